"""Ids equal published vectors and transformers; text comes back; streams hold back half characters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from support.data import data_file, demo_file
from support.tiny_models import CHAT_TEMPLATE, build_folder, build_gguf
from trivet.checkpoint import GGUFCheckpoint, HuggingFaceCheckpoint, Tokenizer
from trivet.checkpoint.export import tokenizer_files
from trivet.checkpoint.tokenizer import quick_json, tokenizer_from_folder
from trivet.errors import CheckpointError, RequestError

TEXTS = [
    "",
    "Hello, world!",
    "  two  spaces\n\nand lines\t",
    "numbers 1234567890 and 3.14",
    "caf\u00e9 na\u00efve \u00fcber stra\u00dfe",
    "\u4f60\u597d\uff0c\u4e16\u754c \U0001f680\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "def f(x):\n    return x ** 2  # square\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "we'll they've I'm it's 'quoted'",
]


def _vectors(name: str) -> list[tuple[str, list[int]]]:
    base = f"tokenizer/vectors/ggml-vocab-{name}.gguf"
    raw = data_file(base + ".inp").read_bytes().decode()
    lines = data_file(base + ".out").read_text().split("\n")
    texts = raw.split("\n__ggml_vocab_test__\n")
    ids = [[int(n) for n in line.split()] for line in lines[: len(texts)]]
    assert len(texts) == len(ids) > 40
    return list(zip(texts, ids, strict=True))


def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(GGUFCheckpoint(path).tokenizer_data(), path)


@pytest.mark.data
@pytest.mark.parametrize("name", ["gpt-2", "phi-3", "qwen2"])
def test_ids_equal_the_vectors(name: str) -> None:
    tokenizer = _tokenizer(data_file(f"tokenizer/vocab/ggml-vocab-{name}.gguf"))
    for text, ids in _vectors(name):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert decoded == text, ids
        stream = tokenizer.detokenizer(skip_special_tokens=False, continuing=False)
        assert "".join(map(stream.push, ids)) + stream.finish() == text


@pytest.mark.data
@pytest.mark.parametrize("name", ["gpt-2", "phi-3", "qwen2"])
def test_the_quick_form_gives_the_same_ids(name: str) -> None:
    path = data_file(f"tokenizer/vocab/ggml-vocab-{name}.gguf")
    data = GGUFCheckpoint(path).tokenizer_data()
    quick = dataclasses.replace(data, json=quick_json(data.json))
    assert len(quick.json) < len(data.json)
    assert quick_json(quick.json) == quick.json
    tokenizer, other = Tokenizer(data, path), Tokenizer(quick, path)
    for text, _ in _vectors(name):
        assert other.encode(text) == tokenizer.encode(text)


def test_merges_that_hold_spaces_keep_their_form() -> None:
    vocab = {"a": 0, " ": 1, "a ": 2, "b": 3, "ab": 4}
    merges = [["a", " "], ["a", "b"]]
    content = {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": merges}}
    text = json.dumps(content)
    assert quick_json(text) == text
    content["model"] = {"type": "BPE", "vocab": vocab, "merges": merges[1:]}
    assert json.loads(quick_json(json.dumps(content)))["model"]["merges"] == ["a b"]


@pytest.mark.data
def test_other_vocabularies_are_refused_by_name() -> None:
    checkpoint = GGUFCheckpoint(data_file("tokenizer/vocab/ggml-vocab-bert-bge.gguf"))
    with pytest.raises(CheckpointError, match="'bert'"):
        checkpoint.tokenizer_data()


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_demo_ids_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    path = demo_file()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = _tokenizer(path)
    texts = [*TEXTS, data_file("corpora/wikitext2_valid.txt").read_text()[:20000]]
    # transformers rebuilds this tokenizer without its rule that digits stand alone, which shows
    # where a space meets a digit that has no merge (a fraction): that text is left out.
    texts += [text for text, _ in _vectors("gpt-2") if "\u00bd" not in text]
    for text in texts:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        ids = ours.encode(text)
        assert ours.decode(ids, False) == theirs.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.demo
def test_demo_splits_every_digit_from_its_space() -> None:
    tokenizer = _tokenizer(demo_file())
    pieces = [tokenizer.id_to_token(i) for i in tokenizer.encode("in 1999")]
    assert pieces == ["in", "\u0120", "1", "9", "9", "9"]


@pytest.mark.demo
def test_demo_chat_ends_where_the_answer_begins() -> None:
    tokenizer = _tokenizer(demo_file())
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == 1
    assert tokenizer.eos_ids == {2}
    assert tokenizer.bos_id == 1
    assert tokenizer.decode(ids) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")


@pytest.fixture
def tiny(tmp_path: Path) -> Tokenizer:
    folder = build_folder(tmp_path / "tiny", "llama3")
    return Tokenizer(HuggingFaceCheckpoint(folder).tokenizer_data())


def test_folder_and_gguf_give_the_same_tokenizer(tiny: Tokenizer, tmp_path: Path) -> None:
    rebuilt = _tokenizer(build_gguf(tmp_path / "tiny.gguf", "llama3"))
    assert tiny.eos_ids == rebuilt.eos_ids == {2}
    assert tiny.bos_id == rebuilt.bos_id == 0
    assert tiny.chat_template == rebuilt.chat_template == CHAT_TEMPLATE
    assert tiny.special_ids == rebuilt.special_ids == {0, 1, 2}
    for text in TEXTS:
        ids = tiny.encode(text)
        assert ids == rebuilt.encode(text)
        assert tiny.decode(ids, skip_special_tokens=False) == text
        assert rebuilt.decode(ids, skip_special_tokens=False) == text


def test_stream_holds_back_half_characters(tiny: Tokenizer) -> None:
    text = "\u4f60\U0001f680!"
    stream = tiny.detokenizer()
    pieces = [stream.push(i) for i in tiny.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert [p for p in pieces if p] == ["\u4f60", "\U0001f680", "!"]


def test_stream_drops_an_incomplete_end(tiny: Tokenizer) -> None:
    ids = tiny.encode("a\U0001f680")[:-1]
    stream = tiny.detokenizer()
    assert "".join(map(stream.push, ids)) + stream.finish() == "a"
    assert tiny.decode(ids).endswith("\ufffd")


def test_stream_replaces_bytes_that_are_no_text(tiny: Tokenizer) -> None:
    token = tiny.encode("\U0001f680")[0]
    stream = tiny.detokenizer()
    pieces = [stream.push(token), *(stream.push(i) for i in tiny.encode("ok"))]
    assert "".join(pieces) == "\ufffdok" == tiny.decode([token, *tiny.encode("ok")])


def test_special_tokens_are_kept_or_skipped(tiny: Tokenizer) -> None:
    ids = tiny.encode("<|im_start|>the<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tiny.decode(ids) == "the"
    assert tiny.decode(ids, skip_special_tokens=False) == "<|im_start|>the<|im_end|>"
    stream = tiny.detokenizer(skip_special_tokens=False)
    assert "".join(map(stream.push, ids)) == "<|im_start|>the<|im_end|>"


def test_ids_outside_the_vocabulary_are_empty(tiny: Tokenizer) -> None:
    assert tiny.token_bytes(10**9) == b""
    assert tiny.token_bytes(-1) == b""
    assert tiny.id_to_token(1 << 40) is None
    assert tiny.decode([10**6]) == ""


def test_no_vocabulary_holds_a_lone_surrogate(tiny: Tokenizer) -> None:
    assert tiny.token_to_id("\ud800") is None


def test_token_bytes_join_to_the_text(tiny: Tokenizer) -> None:
    text = "the \u4f60 fox"
    assert b"".join(map(tiny.token_bytes, tiny.encode(text))) == text.encode()


def test_a_long_text_has_the_same_ids_and_lets_other_threads_run(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`encode` of the library keeps every other thread waiting, `encode_batch` does not."""
    text = "The cat sat on the mat, and the hat. " * 1000
    expected = tiny._backend.encode(text).ids

    class Backend:
        def encode(self, *_: object, **__: object) -> None:
            raise AssertionError("the text is long")

        encode_batch = tiny._backend.encode_batch

    monkeypatch.setattr(tiny, "_backend", Backend())
    assert tiny.encode(text) == expected


def test_no_token_is_longer_than_max_token_chars(tiny: Tokenizer) -> None:
    lengths = [len(tiny.id_to_token(i) or "") for i in range(tiny.vocab_size)]
    assert tiny.max_token_chars == max(lengths)


def test_lone_surrogate_is_a_request_error(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate") as caught:
        tiny.encode("a\ud800b", param="messages")
    assert caught.value.param == "messages"


@pytest.mark.data
def test_sentencepiece_keeps_the_space_of_a_continuation() -> None:
    tokenizer = _tokenizer(data_file("tokenizer/vocab/ggml-vocab-phi-3.gguf"))
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    assert tokenizer.decode(ids) == "Hello world"
    assert tokenizer.detokenizer().push(ids[-1]) == " world"
    assert tokenizer.encode("Hello world") == [1, *ids]
    stream = tokenizer.detokenizer(continuing=False)
    assert "".join(map(stream.push, ids)) == "Hello world"


@pytest.mark.data
def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = _tokenizer(data_file("tokenizer/vocab/ggml-vocab-phi-3.gguf"))
    text = "\U0001f9ff"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 5  # the prefix space and four bytes
    stream = tokenizer.detokenizer(continuing=False)
    assert [stream.push(i) for i in ids] == ["", "", "", "", text]


@pytest.mark.data
@pytest.mark.parametrize("name", ["phi-3", "qwen2"])
def test_rebuilt_tokenizers_survive_a_folder(name: str, tmp_path: Path) -> None:
    data = GGUFCheckpoint(data_file(f"tokenizer/vocab/ggml-vocab-{name}.gguf")).tokenizer_data()
    for file, text in tokenizer_files(data, 4096).items():
        (tmp_path / file).write_text(text, "utf-8")
    again = tokenizer_from_folder(tmp_path, {"eos_token_id": list(data.eos_ids)})
    assert (again.style, again.strip_leading) == (data.style, data.strip_leading)
    assert (again.bos_id, set(again.eos_ids)) == (data.bos_id, set(data.eos_ids))
    assert again.chat_template == data.chat_template
    one, two = Tokenizer(data), Tokenizer(again)
    for text in TEXTS:
        assert one.encode(text) == two.encode(text)
        assert one.decode(one.encode(text)) == two.decode(two.encode(text))
