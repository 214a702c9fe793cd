"""``profile.json``: what is written is read again, anything else is refused with its name."""

import dataclasses
import json

import pytest

import profiles
from pico_vllm.errors import ConfigError
from pico_vllm.profiling.profile import read_profile, write_profile


def test_a_profile_survives_its_file(tmp_path):
    profile = profiles.profile()
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path) == read_profile(tmp_path / "profile.json") == profile


def test_the_file_says_what_it_is_and_has_the_environment(tmp_path):
    write_profile(profiles.profile(), tmp_path / "profile.json")
    fields = json.loads((tmp_path / "profile.json").read_text())
    assert (fields["schema"], fields["version"]) == ("pico-vllm-profile", 1)
    assert fields["environment"]["gpu"] == "GPU A"
    assert fields["summary"]["gaps"]["num"] == 1


def test_a_missing_one_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"can't read the capture .*none: No such file.*profile run --out DIR"):
        read_profile(tmp_path / "none")


@pytest.mark.parametrize("change", [{"version": 2}, {"version": None}])
def test_another_version_is_refused_with_both_numbers(tmp_path, change):
    path = tmp_path / "profile.json"
    write_profile(profiles.profile(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(
        ConfigError, match=rf"has version {change['version']} of the format and this program reads version 1"
    ):
        read_profile(path)


@pytest.mark.parametrize(
    "text, message",
    [
        ("no json", "is no profile.json: "),
        ("[]", "is no profile.json of"),
        ('{"schema": "other"}', "is no profile.json of"),
        ('{"schema": "pico-vllm-profile", "version": 1}', "is damaged: .*environment"),
    ],
)
def test_something_else_is_refused(tmp_path, text, message):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_profile(tmp_path)


def test_a_number_that_json_has_not_is_never_written(tmp_path):
    broken = dataclasses.replace(profiles.profile(), unprofiled_step_us=float("nan"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_profile(broken, tmp_path / "profile.json")
