"""The wire format against an independent reader, in both encodings, and what it refuses."""

import contextlib
import json
import subprocess
import sys
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import msgpack_reader

from mstar.communication import messages as m
from mstar.communication import wire
from mstar.communication.wire_types import describe

TENSORS = m.TensorColumns(
    arena="mstar-1000-ab-w0-1-0", ticket=(1 << 32) + 7, offset=4096, dtypes=["bfloat16"], shapes=[(2, 3)], counts=[1]
)
SAMPLING = m.SamplingParams(temperature=0.5, seed=2**63, stop_token_ids=(2, 5), bias_ids=(7,), bias_values=(-1.5,))
EXAMPLES = (
    m.StartWalk(
        rid="r1",
        partition="main",
        walks=("prefill", "decode"),
        last=True,
        open=m.OpenRequest(
            sampling=SAMPLING,
            prompt_ids=m.HostTensor("int32", (2,), b"\x01\0\0\0\x02\0\0\0"),
            inputs={"pixels": m.HostTensor("bfloat16", (1, 1), b"\x80\x3f")},
            limits={"max_tokens": 70000},
        ),
    ),
    m.Open(rid="r1", open=m.OpenRequest(sampling=SAMPLING, limits={"steps": 3})),
    m.Opened(rid="r1", rank=1),
    m.Stop("r1", "main"),
    m.Unpersist("r1", "main", "pixels"),
    m.Remove("r–ü1"),
    m.AskSteps(ask=3, since_ns=1 << 45),
    m.StepReport(
        ask=3,
        rank=1,
        nodes=["LLM"],
        composed_ns=[1 << 45],
        submitted_ns=[(1 << 45) + 1],
        began_ns=[(1 << 45) + 2],
        ended_ns=[(1 << 45) + 900],
        part_steps=[0, 0],
        walks=["decode", "prefill"],
        part_rows=[2, 1],
        part_tokens=[2, 128],
        rows=[0, 1, 2],
        rids=["r1", "r2", "r3"],
    ),
    m.Shutdown(),
    m.PeerUp(-1, 1, "ipc:///tmp/x/front.1"),
    m.PeerLost(3, 2, "killed by signal 9"),
    m.Hello(rank=0, incarnation=1, version="0.1.0", schema_hash="00ff", pid=4_000_000),
    m.EdgeFrame(src=0, rids=["r1"], slots=[4], counts=[1], tensors=TENSORS),
    m.StreamFrame(
        src=1,
        rids=["r1", "r2"],
        edges=[0, 0],
        tags=[1, 2],
        tensors=TENSORS,
        end_rids=["r2"],
        end_edges=[0],
        end_totals=[300],
    ),
    m.AckFrame(src=1, tickets=[(1 << 32) + 7], credit_rids=["r1"], credit_edges=[0], credit_counts=[12]),
    m.MemoryPlan(rank=0, rows=(m.PlanRow("weights", "bf16", 1 << 33),)),
    m.Ready(rank=0, incarnation=1, max_total_tokens=8192),
    m.Heartbeat(rank=0, incarnation=1, step_age_s=0.25, gauges={'mstar_pages{pool="kv",state="free"}': 12.0}),
    m.EmitFrame(
        src=0,
        rids=["r1", "r2"],
        signals=["token"],
        tokens=[17, 248_000],
        logprobs=[m.TokenLogprobs(-0.5, (17, 3), (-0.5, -2.25)), None],
        tensor_rids=["r2"],
        tensor_signals=["waveform"],
        tensors=[m.HostTensor("float32", (1,), b"\0\0\x80\x3f")],
    ),
    m.WalkDone(rid="r1", partition="main", rank=0, reason="stop", emits={"token": 64}),
    m.Fail("r1", "no pages left", 503),
    m.LoadProgress(rank=0, label="weights", done=3, total=9),
)


def plain(value: Any) -> Any:
    """What an encoding without types can say of a message, from its fields alone."""
    if isinstance(value, msgspec.Struct):
        config, fields = (
            value.__struct_config__,
            {name: plain(getattr(value, name)) for name in value.__struct_fields__},
        )
        if config.array_like:
            return list(fields.values())
        return {"type": type(value).__name__, **fields} if config.tag is not None else fields
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def test_every_message_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(get_args(m.Message))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_round_trip(message: m.Message, codec: str) -> None:
    frame = wire._encoder(type(message), codec)(message)
    assert frame[0] == {"msgpack": 1, "json": 2}[codec]
    assert wire.decode(frame) == message
    assert wire.decode(memoryview(bytearray(frame))) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda e: type(e).__name__)
def test_msgpack_bytes_say_the_fields_by_name(message: m.Message) -> None:
    assert msgpack_reader.read(wire._encoder(type(message), "msgpack")(message)[1:]) == plain(message)


def test_golden_bytes() -> None:
    """Frozen by hand from the MessagePack specification: a change here is a change of the format."""
    stop = bytes.fromhex("01 83 a4 74797065 a4 53746f70 a3 726964 a2 7231 a9 706172746974696f6e a1 6d")
    assert wire._encoder(m.Stop, "msgpack")(m.Stop("r1", "m")) == stop
    ack = bytes.fromhex(
        "01 86 a4 74797065 a8 41636b4672616d65 a3 737263 03 a7 7469636b657473 92 ce00010000 cd0100"
        "ab 6372656469745f72696473 91 a2 7231 ac 6372656469745f6564676573 91 00"
        "ad 6372656469745f636f756e7473 91 cc80"
    )
    message = m.AckFrame(src=3, tickets=[65536, 256], credit_rids=["r1"], credit_edges=[0], credit_counts=[128])
    assert wire._encoder(m.AckFrame, "msgpack")(message) == ack
    assert wire.decode_to_worker(ack) == message
    assert json.loads(wire._encoder(m.Stop, "json")(m.Stop("r1", "m"))[1:]) == {
        "type": "Stop",
        "rid": "r1",
        "partition": "m",
    }


def test_reader_reads_the_specifications_examples() -> None:
    assert msgpack_reader.read(bytes.fromhex("82a7636f6d70616374c3a6736368656d6100")) == {"compact": True, "schema": 0}
    assert msgpack_reader.read(bytes.fromhex("93d1ff00cb3ff8000000000000c403010203")) == [-256, 1.5, b"\x01\x02\x03"]
    assert msgpack_reader.read(bytes.fromhex("93e0c0ca3fc00000")) == [-32, None, 1.5]


def test_a_direction_refuses_the_other_directions_messages() -> None:
    emit = next(e for e in EXAMPLES if isinstance(e, m.EmitFrame))
    assert wire.decode_to_front(wire.encode(emit)) == emit
    with pytest.raises(wire.WireError, match="EmitFrame"):
        wire.decode_to_worker(wire.encode(emit))
    progress = next(e for e in EXAMPLES if isinstance(e, m.LoadProgress))
    assert wire.decode_to_supervisor(wire.encode(progress)) == progress
    with pytest.raises(wire.WireError):
        wire.decode_to_front(wire.encode(progress))


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "empty"),
        (b"\x80\x04K\x01.", "unknown encoding 0x80"),
        (b"\x01", "bytes"),
        (b"\x01\xc1", "bytes"),
        (b"\x02{}", "type"),
        (b"\x02\xff\xff", "bytes"),
        (b'\x02{"type": "Remove", "rid": 7}', "str"),
        (b'\x02{"type": "Remove"}', "rid"),
        (b'\x02{"type": "Nonsense"}', "Nonsense"),
    ],
)
def test_bad_frames(frame: bytes, says: str) -> None:
    with pytest.raises(wire.WireError, match=says):
        wire.decode(frame)


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x01", b"\x02", b"\x01\x82\xa4type\xa6Remove"]))
def test_no_bytes_raise_anything_else(tail: bytes, head: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        wire.decode(head + tail)


@given(st.integers(0, len(EXAMPLES) - 1), st.data())
def test_a_truncated_or_altered_frame_is_refused_or_is_a_message(index: int, data: st.DataObject) -> None:
    frame = bytearray(
        wire._encoder(type(EXAMPLES[index]), data.draw(st.sampled_from(["msgpack", "json"])))(EXAMPLES[index])
    )
    cut = data.draw(st.integers(1, len(frame) - 1))
    with pytest.raises(wire.WireError):
        wire.decode(frame[:cut])
    frame[cut] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(wire.WireError):
        assert isinstance(wire.decode(frame), get_args(m.Message))


class Child(msgspec.Struct):
    values: list[Any]


class Thing:
    pass


def struct_of(annotation: object) -> type[msgspec.Struct]:
    return msgspec.defstruct("Bad", [("good", int), ("bad", annotation)])


@pytest.mark.parametrize(
    ("annotation", "path"),
    [
        (Any, r"Bad\.bad is untyped"),
        (object, r"Bad\.bad is untyped"),
        (list, r"Bad\.bad\[\] is untyped"),
        (tuple, r"Bad\.bad\[\] is untyped"),
        (dict, r"Bad\.bad key is untyped"),
        (dict[str, Any], r"Bad\.bad\{\} is untyped"),
        (list[dict[str, list]], r"Bad\.bad\[\]\{\}\[\] is untyped"),
        (tuple[int, Any], r"Bad\.bad\[1\] is untyped"),
        (int | Any, r"Bad\.bad is untyped"),
        (Child | None, r"Bad\.bad\.values\[\] is untyped"),
        (Thing, r"Bad\.bad is untyped.*Thing"),
        (msgspec.Raw, r"Bad\.bad: RawType"),
        (msgspec.msgpack.Ext, r"Bad\.bad"),
        (set[int], r"Bad\.bad: SetType"),
    ],
)
def test_untyped_fields_are_refused(annotation: object, path: str) -> None:
    with pytest.raises(TypeError, match=path):
        wire._encoder(struct_of(annotation))
    with pytest.raises(TypeError, match=path):
        wire._decoder(struct_of(annotation))


def test_typed_neighbours_are_accepted() -> None:
    kind = struct_of(dict[str, list[tuple[int, str | None]]])
    frame = wire._encoder(kind)(kind(1, {"a": [(1, None)]}))
    assert wire._decoder(kind)(frame) == kind(1, {"a": [(1, None)]})


def test_an_untyped_field_ends_the_import_of_wire() -> None:
    script = (
        "import msgspec, typing\n"
        "import mstar.communication.messages as m\n"
        "bad = msgspec.defstruct('Bad', [('x', dict)], tag=True)\n"
        "m.Message = m.Message | bad\n"
        "import mstar.communication.wire\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "TypeError: Bad.x key is untyped" in done.stderr


def test_only_messages_are_encoded() -> None:
    with pytest.raises(TypeError, match="no message"):
        wire.encode({"type": "Stop"})
    with pytest.raises(TypeError, match="no message"):
        wire.encode(TENSORS)


@pytest.mark.parametrize(("codec", "first"), [("msgpack", 1), ("json", 2)])
def test_the_variable_picks_the_encoding(codec: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTAR_WIRE_CODEC", codec)
    assert wire._encoder(m.Shutdown)(m.Shutdown())[0] == first


def test_schema_hash_tells_field_names_types_and_order_apart() -> None:
    def text(*fields: tuple) -> str:
        return describe(msgspec.defstruct("S", fields, tag=True))

    base = text(("a", int), ("b", str))
    assert base == text(("a", int), ("b", str))
    others = {
        text(("b", str), ("a", int)),
        text(("a", int), ("c", str)),
        text(("a", int), ("b", bytes)),
        text(("a", int), ("b", str, "x")),
        text(
            ("a", int),
        ),
    }
    assert len(others | {base}) == 6
    assert len(wire.schema_hash()) == 16


def test_a_strangers_hello_is_refused_with_the_reason() -> None:
    hello = m.Hello(rank=1, incarnation=1, version="0.1.0", schema_hash=wire.schema_hash(), pid=1)
    assert wire.why_refused(hello, "0.1.0") is None
    assert "0.2.0" in str(wire.why_refused(hello, "0.2.0"))
    assert "schema" in str(wire.why_refused(msgspec.structs.replace(hello, schema_hash="0"), "0.1.0"))
