"""Tables that were cut short or changed are noticed, and what is written reads back as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import InvalidDataError

COLUMNS = store.TABLES["quarantine"]
CELLS = st.one_of(
    st.sampled_from(["", "NA", "nan", "0", "1e5", "# 1 rows", '"', ",", "\n"]),
    st.text(st.sampled_from("ab0 1.,;\"'#\n-é→"), max_size=12),
)
TABLES = st.lists(st.tuples(*[CELLS] * len(COLUMNS)), max_size=6).map(lambda rows: pd.DataFrame(rows, columns=COLUMNS))


def parse(content: bytes) -> pd.DataFrame:
    return store.parse(content, COLUMNS, "op.quarantine.csv")


@given(TABLES)
def test_tables_read_back_as_they_were_written(table: pd.DataFrame) -> None:
    again = parse(store.render(table).encode())
    assert again.to_numpy().tolist() == table.to_numpy().tolist()


@given(TABLES)
def test_a_table_cut_short_at_any_byte_is_noticed(table: pd.DataFrame) -> None:
    content = store.render(table).encode()
    for length in range(len(content)):
        with pytest.raises(InvalidDataError, match=r"op\.quarantine\.csv"):
            parse(content[:length])


@given(TABLES, st.data())
def test_a_changed_byte_is_noticed_or_changes_nothing(table: pd.DataFrame, data: st.DataObject) -> None:
    content = bytearray(store.render(table).encode())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        again = parse(bytes(content))
    except InvalidDataError:
        return
    assert again.to_numpy().tolist() == table.to_numpy().tolist()


@given(TABLES.filter(len), st.data())
def test_a_row_that_is_gone_is_noticed(table: pd.DataFrame, data: st.DataObject) -> None:
    fewer = table.drop(index=data.draw(st.integers(0, len(table) - 1)))
    body = "".join(store.render(fewer).splitlines(keepends=True)[:-1])
    footer = store.render(table).splitlines(keepends=True)[-1]
    with pytest.raises(InvalidDataError, match="digest"):
        parse((body + footer).encode())


def test_an_interrupted_write_leaves_the_table_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old = tmp_path / "op.quarantine.csv", pd.DataFrame([["old"] * len(COLUMNS)], columns=COLUMNS)
    store.write(file, old)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        store.write(file, old.assign(reason="new"))
    assert store.read(file, COLUMNS).equals(old)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
