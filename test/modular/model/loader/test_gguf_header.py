from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import write_gguf

from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.gguf_header import read_gguf_header


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def every_kind(writer: gguf.GGUFWriter) -> None:
        writer.add_uint8("test.u8", 200)
        writer.add_int8("test.i8", -100)
        writer.add_uint16("test.u16", 60000)
        writer.add_int16("test.i16", -30000)
        writer.add_uint64("test.u64", 1 << 63)
        writer.add_int64("test.i64", -(1 << 62))
        writer.add_float64("test.f64", 0.1)
        writer.add_bool("test.bool", True)
        writer.add_string("test.string", "héllo 日本")
        writer.add_array("test.floats", [0.5, -1.25])
        writer.add_array("test.bools", [True, False])
        writer.add_array("test.strings", ["a", "", "ü"])

    path = tmp_path_factory.mktemp("header") / "tiny.gguf"
    write_gguf(path, tensor_type=lambda name: gguf.GGMLQuantizationType.Q8_0, extra=every_kind)
    return path


def test_everything_equals_the_gguf_library(file: Path):
    header, reader = read_gguf_header(file), gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == fields
    assert fields["test.strings"] == ["a", "", "ü"]
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        entry = header.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert (entry.ggml_type, entry.offset, entry.num_bytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 24, 100, 5000, -1])
def test_a_truncated_file_is_an_error(file: Path, tmp_path: Path, kept: int):
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"cut.gguf is not a complete GGUF file"):
        read_gguf_header(tmp_path / "cut.gguf")


@given(st.data())
def test_any_prefix_and_any_flipped_header_byte_is_read_or_refused(
    file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, 6000), "flipped byte")
    content[at] = data.draw(st.integers(0, 255), "its value")
    keep = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content) - 1)), "bytes kept")
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content[:keep])
    try:
        header = read_gguf_header(path)
    except CheckpointError:
        return
    assert keep == len(content), "a file without its end was accepted"
    assert all(entry.offset + entry.num_bytes <= keep for entry in header.tensors.values())


def test_other_files_are_named(tmp_path: Path):
    (tmp_path / "zip.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="begins with b'PK"):
        read_gguf_header(tmp_path / "zip.gguf")
    with pytest.raises(CheckpointError, match="there is no file"):
        read_gguf_header(tmp_path / "absent.gguf")


def test_an_unknown_version_is_refused(file: Path, tmp_path: Path):
    content = bytearray(file.read_bytes())
    content[4] = 9
    (tmp_path / "new.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="its version is 9"):
        read_gguf_header(tmp_path / "new.gguf")


def test_a_part_of_a_split_file_says_how_to_join(tmp_path: Path):
    write_gguf(tmp_path / "part.gguf", extra=lambda writer: writer.add_uint16("split.count", 2))
    with pytest.raises(CheckpointError, match="llama-gguf-split --merge"):
        read_gguf_header(tmp_path / "part.gguf")
