"""The tool that holds the JSON of 200 checks to its schema, on a few of them."""

from __future__ import annotations

import pytest

import contract_outputs


@pytest.mark.slow
def test_a_few_outputs_of_each_kind_fit_the_schema(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["contract_outputs.py", "--most", "1"])
    monkeypatch.chdir(contract_outputs.SCRIPTS)  # the tool works there; afterwards this puts the folder back
    contract_outputs.main()
    assert "4 of 4 " in capsys.readouterr().out
