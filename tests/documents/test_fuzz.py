"""Ten thousand hostile documents of every kind: a result or a sentence, in 10 seconds and 2 GB each."""

import pytest
from fuzzing import fuzz


@pytest.mark.heavy
def test_hostile_documents_are_read_or_refused(capsys: pytest.CaptureFixture[str]):
    report = fuzz(range(10_000))

    with capsys.disabled():
        print(f"\n{report}")  # noqa: T201, what was covered
    assert not report.failures, "\n\n".join(f"seed {s}: {f}" for s, f in [*report.failures.items()][:5])
    assert len({kind for kind, _ in report.counts}) > 40
