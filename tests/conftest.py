"""Before any test module is imported: without a GPU, Triton's kernels run in its interpreter (read at decoration)."""

import importlib.util
import os

if importlib.util.find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
