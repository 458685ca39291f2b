"""The reports for machines against the published schemas, which packages of two registries carry."""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from normlab.report.ci_formats import junit, sarif
from report.test_ci_formats import REPORTS

etree = pytest.importorskip("lxml.etree", reason="lxml is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

pytestmark = pytest.mark.slow


def unpacked(folder: Path, name: str, command: list[str]) -> Path:
    """Fetch a package into an empty folder and unpack it; return the file of this name in it."""
    fetched = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    archives = list(folder.glob("*gz"))
    if not archives:
        pytest.skip(f"{command[0]} did not fetch the schema: {fetched.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.rglob(name))


@pytest.fixture(scope="module")
def code_scanning(tmp_path_factory):
    """The schema of SARIF 2.1.0."""
    if not (npm := shutil.which("npm")):
        pytest.skip("npm is not installed")
    pack = [npm, "pack", "@microsoft/jest-sarif@1.0.0-beta.0"]
    return json.loads(unpacked(tmp_path_factory.mktemp("sarif"), "sarif-2.1.0-rtm.5.json", pack).read_text())


@pytest.fixture(scope="module")
def junit_schema(tmp_path_factory):
    """The schema of Jenkins' test reports, from the tests of pytest."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        "pytest==8.3.4",
    ]
    return etree.XMLSchema(etree.parse(unpacked(tmp_path_factory.mktemp("junit"), "junit-10.xsd", pip)))


@pytest.mark.parametrize("given", [REPORTS, []])
def test_code_scanning_is_valid_sarif(code_scanning, given):
    report = json.loads(sarif(given))
    jsonschema.validate(report, code_scanning)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**report, "version": "1"}, code_scanning)


@pytest.mark.parametrize("given", [REPORTS, []])
def test_a_test_report_is_valid_junit(junit_schema, given):
    junit_schema.assertValid(etree.fromstring(junit(given).encode()))
    assert not junit_schema.validate(etree.fromstring("<testsuites><case/></testsuites>"))
