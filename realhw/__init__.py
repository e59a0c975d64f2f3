import sys

from traces.one_line import end_in_one_line

if sys.argv[:1] == ["-m"]:  # python -m realhw.MODULE, before the module's own imports
    end_in_one_line()
