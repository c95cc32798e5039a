"""Reading the metrics text of an engine."""

from __future__ import annotations

from runner.engines.exposition import read_samples

TEXT = """\
# HELP e:running Requests that run.
# TYPE e:running gauge
e:running{engine="0",model_name="a \\"b\\""} 2.0
e:running{engine="1",model_name="a \\"b\\""} 3
e:config_info{block_size="16",note="x{y} 1"} 1.0 1795288626000
e:wait_bucket{le="1.0"} 4
e:nan NaN
e:infinite +Inf
e:plain 7e2
other:thing 1
e:broken{ 1
"""


def test_samples_are_summed_over_their_labels() -> None:
    samples = read_samples(TEXT, "e:")
    assert samples.total("e:running") == 5.0
    assert samples.count("e:absent", "e:plain") == 700
    assert samples.total("e:absent") is None


def test_labels_may_hold_any_text() -> None:
    samples = read_samples(TEXT, "e:")
    assert samples.labels("e:config_info") == {"block_size": "16", "note": "x{y} 1"}
    assert samples.labels("e:absent") == {}


def test_what_is_no_number_or_of_others_is_left_out() -> None:
    samples = read_samples(TEXT, "e:")
    assert set(samples.found) == {"e:running", "e:config_info", "e:plain"}
