"""The table of layers, without the screen."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from statecli.browse.layers import LAYER_CELLS, LayerMeasure, build_tables, choose_columns, format_cell, list_widths
from statecli.browse.peek import Versions, read_statistics

from .conftest import open_model


@pytest.fixture
def read(tmp_path):
    def run(tensors):
        save_file(tensors, tmp_path / "x.safetensors")
        model = open_model(tmp_path / "x.safetensors")
        for position, tensor in enumerate(model.tensors):
            model.add_stats(position, read_statistics(tensor, Versions({})))
        model.unusual.find_outliers()
        return model, build_tables(model.tensors, model.unusual.list_roles())

    return run


def test_cells_equal_the_numbers_of_torch(read):
    """Root mean square and the largest absolute value of each tensor."""
    tensors = {f"h.{n}.{name}": torch.randn(5, 3) for n in range(6) for name in ("a.weight", "b.weight")}
    model, (table,) = read(tensors)
    assert (table.title, [column.title for column in table.columns]) == ("h", ["a", "b"])
    for column in table.columns:
        for row, layer in enumerate(table.layers):
            tensor = tensors[f"h.{layer}.{column.name}"]
            rms, largest = tensor.pow(2).mean().sqrt().item(), tensor.abs().max().item()
            cells = [format_cell(model, column, row, measure) for measure in (LayerMeasure.RMS, LayerMeasure.MAX)]
            assert [float(cell.removeprefix("! ")) for cell in cells] == pytest.approx([rms, largest], rel=0.01)


def test_encoder_and_decoder_are_two_tables(read):
    """Each with its own layers and columns."""
    names = [f"encoder.layers.{n}.q.weight" for n in range(6)] + [f"decoder.layers.{n}.v.weight" for n in range(8)]
    _, tables = read({name: torch.ones(2) for name in names})
    assert sorted((table.title, len(table.layers)) for table in tables) == [
        ("decoder.layers", 8),
        ("encoder.layers", 6),
    ]


def test_a_layer_without_a_tensor_has_an_empty_cell(read):
    """Only every second layer has experts; the other layers have an empty cell."""
    names = [f"h.{n}.q" for n in range(10)] + [f"h.{n}.expert" for n in range(0, 10, 2)]
    model, (table,) = read({name: torch.ones(2) for name in names})
    (column,) = (column for column in table.columns if column.title == "expert")
    assert [format_cell(model, column, row, LayerMeasure.RMS) for row in range(4)] == ["1", "", "1", ""]


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_column_of_the_cursor_is_shown(read, width):
    """As many columns as fit are shown, and always the column of the cursor."""
    _, (table,) = read({f"h.{n}.projection_number_{name}": torch.ones(2) for n in range(5) for name in range(30)})
    for cursor in range(30):
        columns = choose_columns(table, width, cursor)
        assert cursor in columns
        fit = LAYER_CELLS + sum(list_widths(table)[number] for number in columns) <= width
        assert (len(columns) == 1, fit) == (width == 20, width != 20)
