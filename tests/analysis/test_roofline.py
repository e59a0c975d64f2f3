from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.roofline import GB, TIERS, Ceiling, draw_roofline, fit_ceiling, tier_ceilings
from analysis.selection import Case, NotDrawn, best_by_system

HBM, LINK, REMOTE = TIERS
BANDWIDTH, SHARED_BYTES = 3.0e12, 16e9


def stated(tier, moved, batch, bandwidth=BANDWIDTH, shared_bytes=SHARED_BYTES):
    """Rows whose ceilings follow the formula exactly."""
    moved, batch = np.asarray(moved, float), np.broadcast_to(np.asarray(batch, float), np.shape(moved))
    ceiling = 1 / (shared_bytes / bandwidth / batch + moved / bandwidth)
    return pd.DataFrame({tier.bytes_column: moved, tier.ceiling_column: ceiling, "workload.batch_size": batch})


@pytest.mark.parametrize("batch", [32, [1, 4, 32, 256]])
def test_bandwidth_and_weights_are_recovered_from_stated_ceilings(batch):
    ceiling = fit_ceiling(stated(HBM, [1e8, 2e8, 5e8, 9e8], batch), HBM, 32)
    assert ceiling is not None
    assert ceiling.complete
    assert ceiling.bytes_per_s == pytest.approx(BANDWIDTH, rel=1e-6)
    assert ceiling.fixed_s == pytest.approx(SHARED_BYTES / BANDWIDTH / 32, rel=1e-6)


def test_a_link_that_carries_only_kv_is_bandwidth_over_bytes():
    ceiling = fit_ceiling(stated(LINK, [1e6, 3e6, 9e6], 32, 50e9, 0), LINK, 32)
    assert ceiling is not None
    assert ceiling.fixed_s == 0
    assert ceiling.tokens_per_s(2e6) == pytest.approx(50e9 / 2e6, rel=1e-6)


def test_links_of_different_speed_give_the_fastest():
    rows = pd.concat([stated(LINK, [1e6, 3e6], 32, b, 0) for b in (30e9, 50e9)])
    ceiling = fit_ceiling(rows, LINK, 32)
    assert ceiling == Ceiling(pytest.approx(50e9))


def test_one_point_cannot_tell_weights_from_bandwidth_and_says_so():
    hbm, link = fit_ceiling(stated(HBM, [1e8], 32), HBM, 32), fit_ceiling(stated(LINK, [1e6], 32, 5e10, 0), LINK, 32)
    assert hbm is not None
    assert link is not None
    assert not hbm.complete
    assert link.complete
    assert link.bytes_per_s == pytest.approx(5e10)


def test_a_tier_that_nothing_uses_has_no_ceiling(sweep_frame):
    assert [tier.name for tier, _ in tier_ceilings(sweep_frame, 32)] == ["HBM", "host link"]


def test_drawn_ceilings_follow_the_formula_and_markers_the_table(sweep_frame):
    case = Case(sweep_frame)
    axes = draw_roofline(case).axes[0]
    lines = {line.get_gid(): line for line in axes.lines if line.get_gid()}
    ceilings = tier_ceilings(sweep_frame, 32)
    for tier, ceiling in ceilings:
        x, y = (np.asarray(v, float) for v in lines[tier.name].get_data())
        assert y == pytest.approx(1 / (ceiling.fixed_s + GB / x / ceiling.bytes_per_s))
    for _, point in best_by_system(case).iterrows():
        for tier, _ in ceilings:
            marker = lines.get(f"{point['system']}|{tier.name}")
            if point[tier.bytes_column] > 0:
                assert marker is not None
                assert marker.get_xdata()[0] == pytest.approx(GB / point[tier.bytes_column])
                assert marker.get_ydata()[0] == point["throughput_tokens_per_s"]
            else:
                assert marker is None


def test_a_remote_tier_is_drawn_where_it_is_used(sweep_frame):
    rows = sweep_frame.assign(
        remote_bytes_per_token=sweep_frame["h2d_bytes_per_token"],
        remote_ceiling_tokens_per_s=sweep_frame["h2d_ceiling_tokens_per_s"] / 4,
    )
    axes = draw_roofline(Case(rows)).axes[0]
    assert {"HBM", "host link", "remote link"} <= {line.get_gid() for line in axes.lines}


def test_without_bytes_there_is_no_roofline(sweep_frame):
    rows = sweep_frame.assign(kv_bytes_read_per_token=np.nan, h2d_bytes_per_token=np.nan)
    with pytest.raises(NotDrawn, match="no point has both bytes per token and a ceiling"):
        draw_roofline(Case(rows))
