from normlab.base.model_config import derive


def test_values_never_change():
    # Resumed and replayed runs rest on these.
    assert derive(1, "shuffle", 0) == 6538444853084630607
    assert derive(0, "dropout") == 5416676396201021002


def test_every_argument_counts():
    seeds = {
        derive(seed, purpose, *counters)
        for seed in range(4)
        for purpose in ("a", "b", "a1")
        for counters in ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (10,), (1, 10), (11, 0))
    }
    assert len(seeds) == 4 * 3 * 9
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_numpy_integers_are_integers():
    import numpy as np

    assert derive(np.int64(3), "x", np.int32(7)) == derive(3, "x", 7)
