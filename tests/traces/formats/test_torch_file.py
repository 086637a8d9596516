"""Files of torch.save: torch reads them, and nothing in them is run or believed. Without torch the error says what to install."""

import io
import pickletools
import sys
import types
import zipfile
from collections import OrderedDict
from contextlib import suppress
from random import Random

import numpy as np
import pytest
from fuzzing.edits import edited

from bitnet_np.base.errors import Error, FileFormatError, UnsupportedError
from bitnet_np.traces.formats import detect, read_any
from bitnet_np.traces.points import Key

L_OUT = Key("l_out", 0)


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch")


def archive(path, **members):
    with zipfile.ZipFile(path, "w") as file:
        for name, raw in members.items():
            file.writestr(f"t/{name.replace('_', '.')}", raw)
    return path


def test_without_torch_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    path = archive(tmp_path / "t.pt", data_pkl=b"\x80\x02}.")
    assert detect(path) == "torch"
    with pytest.raises(UnsupportedError, match=r"a file of torch\.save needs torch: pip install 'bitnet_np\[torch\]'"):
        read_any(path)


def test_an_old_torch_is_not_asked_to_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2.5.1+cpu"))
    with pytest.raises(UnsupportedError, match=r"torch is 2\.5\.1\+cpu, expected 2\.6 or later"):
        read_any(archive(tmp_path / "t.pt", data_pkl=b"\x80\x02}."))


def test_files_that_torch_would_believe_are_refused_before_it_sees_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "old").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    with pytest.raises(FileFormatError, match=r"expected a zip archive, as torch\.save writes from torch 1\.6 on"):
        read_any(tmp_path / "old", "torch")
    with zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("t/data.pkl", bytes(1000))
    with pytest.raises(FileFormatError, match=r"member 't/data\.pkl' is compressed"):
        read_any(tmp_path / "packed")


def test_tensors_by_label(torch, tmp_path):
    rows = torch.randn(5, 8)
    content = {
        "tokens": torch.tensor([[3, 1, 4, 1, 5]]),
        "hidden_states": tuple(rows[None] + n for n in range(3)),
        "model.layers.0.self_attn.q_proj": rows.T.contiguous().T,  # in another order in memory
        "model.layers.1": (rows.half(), None),
        "logits": rows[:, :6].bfloat16()[None],
        "loss_scale": 3.0,
        "other": rows,
    }
    torch.save(content, tmp_path / "t.pt")
    trace = read_any(tmp_path / "t.pt")
    points = {str(key): array for key, array in trace.points.items()}
    assert set(points) == {"inp_embd", "l_out-0", "l_out-1", "result_norm", "Qcur-0", "result_output"}
    assert trace.ignored == ("other",)
    np.testing.assert_array_equal(trace.tokens, [3, 1, 4, 1, 5])
    np.testing.assert_array_equal(points["result_norm"], (rows + 2).numpy())
    np.testing.assert_array_equal(points["Qcur-0"], rows.numpy())
    assert (points["l_out-1"].dtype, points["result_output"].dtype) == (np.float16, np.float32)
    np.testing.assert_array_equal(points["result_output"], rows[:, :6].bfloat16().float().numpy())
    assert not (points["result_output"].view(np.uint32) & 0xFFFF).any()  # on the grid of bfloat16


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_tensor_alone_is_logits(torch, tmp_path, suffix):
    torch.save(torch.ones(1, 5, 7, requires_grad=True), tmp_path / f"t{suffix}")
    assert read_any(tmp_path / f"t{suffix}").points[Key("result_output", None)].shape == (5, 7)


def transformers_class(monkeypatch, module, name, base):
    """A class of this name in a module that is there while a file is written, as transformers' classes are not when it is read."""
    made = type(name, (base,), {"__module__": module})
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{name: made}))
    return made


class Output(OrderedDict):
    """As transformers' ModelOutput: a field is an item and an attribute, and is pickled as an argument of the class, too."""

    def __init__(self, *fields, **named):
        super().__init__(**named)
        self.__dict__.update(named)

    def __reduce__(self):
        return type(self), tuple(OrderedDict.values(self)), vars(self), None, iter(OrderedDict.items(self))


class Cache:
    def __init__(self, **fields):
        self.__dict__.update(fields)


@pytest.fixture
def returned(torch, monkeypatch, tmp_path):
    """What `torch.save` makes of what a model of two layers and experts returned, and the tensors in it."""

    def make(module="transformers.modeling_outputs", layer="DynamicLayer"):
        with monkeypatch.context() as patch:
            kind = transformers_class(patch, module, "MoeCausalLMOutputWithPast", Output)
            cache = transformers_class(patch, "transformers.cache_utils", "DynamicCache", Cache)
            rows = {name: torch.randn(1, 4, 3, 5) for name in ("keys", "values")}  # as many heads as tokens is the hard case
            sys.modules["transformers.cache_utils"] = types.SimpleNamespace(
                DynamicCache=cache, **{layer: (layer_of := type(layer, (Cache,), {"__module__": "transformers.cache_utils"}))}
            )
            output = kind(
                logits=torch.randn(1, 3, 7),
                aux_loss=torch.tensor(1.0),
                past_key_values=cache(layers=[layer_of(**rows, device=torch.device("cpu"))]),
                attentions=(torch.rand(1, 4, 3, 3),),
                router_logits=(torch.randn(3, 6), torch.randn(3, 6)),
            )
            torch.save(output, tmp_path / "out.pt")
        return tmp_path / "out.pt", output, rows

    return make


@pytest.mark.parametrize("module", ["transformers.modeling_outputs", "transformers.models.gemma3.modeling_gemma3"])
def test_what_a_model_of_transformers_returned(returned, module):
    path, output, rows = returned(module)
    points = {str(key): array for key, array in read_any(path).points.items()}
    assert set(points) == {"result_output", "Kcur_rope-0", "Vcur-0", "kq_soft_max-0", "ffn_moe_logits-0", "ffn_moe_logits-1"}
    np.testing.assert_array_equal(points["result_output"], output["logits"][0].numpy())
    np.testing.assert_array_equal(points["ffn_moe_logits-1"], output["router_logits"][1].numpy())
    np.testing.assert_array_equal(points["Kcur_rope-0"], rows["keys"][0].swapaxes(0, 1).reshape(3, 20).numpy())
    np.testing.assert_array_equal(points["Vcur-0"], rows["values"][0].swapaxes(0, 1).reshape(3, 20).numpy())


def test_caches_that_do_not_hold_all_tokens_are_passed_over(returned):
    keys = {str(key) for key in read_any(returned(layer="DynamicSlidingWindowLayer")[0]).points}
    assert "result_output" in keys
    assert not keys & {"Kcur_rope-0", "Vcur-0"}


@pytest.mark.parametrize("form", [dict, None])
def test_what_generate_returned_is_refused(torch, tmp_path, monkeypatch, form):
    """Its logits are those of single steps, which would be taken for the last position's."""
    kind = form or transformers_class(monkeypatch, "transformers.generation.utils", "GenerateDecoderOnlyOutput", Output)
    torch.save(kind(sequences=torch.tensor([[1, 2, 3]]), logits=(torch.randn(1, 7), torch.randn(1, 7))), tmp_path / "t.pt")
    with pytest.raises(FileFormatError, match="what `generate` returned, step by step, expected what one call of the model returned"):
        read_any(tmp_path / "t.pt")


def test_names_of_transformers_run_nothing(torch, tmp_path, monkeypatch):
    """A stand-in is called, whatever the name is, and fields may have the names of methods."""
    ran = []
    kind = transformers_class(monkeypatch, "transformers.modeling_outputs", "EvilOutput", Output)
    kind.__init__ = lambda self, *fields: ran.append(fields)
    output = kind()
    vars(output).update(items=torch.ones(3, 4), keys=3, __len__=2)
    output["l_out-0"] = torch.ones(3, 4)
    torch.save(output, tmp_path / "t.pt")
    ran.clear()
    assert set(read_any(tmp_path / "t.pt").points) == {L_OUT}
    assert ran == []


class Evil:
    def __reduce__(self):
        return print, ("run",)


def test_what_is_no_tensor_is_not_run(torch, tmp_path, capsys):
    torch.save({"l_out-0": Evil()}, tmp_path / "t.pt")
    with pytest.raises(FileFormatError, match="no file of tensors alone"):
        read_any(tmp_path / "t.pt")
    assert capsys.readouterr().out == ""


def test_tensors_that_claim_more_than_the_file_has_are_refused(torch, tmp_path):
    torch.save({"l_out-0": torch.ones(1).expand(1 << 20, 1 << 20)}, tmp_path / "t.pt")
    with pytest.raises(FileFormatError, match=r"shape \[1048576, 1048576\], but 4 bytes in the file"):
        read_any(tmp_path / "t.pt")
    torch.save({"l_out-0": torch.ones(4, 100)}, tmp_path / "u.pt")
    with zipfile.ZipFile(tmp_path / "u.pt") as source:
        members = {name: source.read(name) for name in source.namelist()}
    pickle = members["u/data.pkl"]
    assert pickle.count(b"M\x90\x01") == 1  # the storage's 400 numbers
    members["u/data.pkl"] = pickle.replace(b"M\x90\x01", b"J\x00\x00\x00\x70").replace(b"K\x04Kd", b"J\x00\x00\x10\x00Kd")
    pickletools.dis(members["u/data.pkl"], out=io.StringIO())
    with zipfile.ZipFile(tmp_path / "u.pt", "w") as target:
        for name, raw in members.items():
            target.writestr(name, raw)
    with pytest.raises(FileFormatError):
        read_any(tmp_path / "u.pt").points[L_OUT].sum()


@pytest.mark.parametrize("make", ["to_sparse", "cfloat", "bool"])
def test_tensors_of_other_kinds_are_refused(torch, tmp_path, make):
    torch.save({"l_out-0": getattr(torch.ones(2, 2), make)()}, tmp_path / "t.pt")
    with pytest.raises(FileFormatError, match=r"expected dense numbers: float64|no file of tensors alone"):
        read_any(tmp_path / "t.pt")


def test_deep_and_crowded_containers_are_refused(torch, tmp_path):
    deep = torch.ones(2)
    for _ in range(20):
        deep = [deep]
    torch.save(deep, tmp_path / "t.pt")
    with pytest.raises(FileFormatError, match="containers deep"):
        read_any(tmp_path / "t.pt")
    crowd = [0]
    for _ in range(7):
        crowd = [crowd] * 30  # a few hundred bytes, 30**7 values
    torch.save(crowd, tmp_path / "u.pt")
    with pytest.raises(FileFormatError, match="containers deep"):
        read_any(tmp_path / "u.pt")


def test_a_damaged_file_is_read_or_refused(torch, tmp_path):
    torch.save({"l_out-0": torch.ones(3, 4), "tokens": torch.arange(3)}, tmp_path / "sound.pt")
    for n in range(150):
        path = tmp_path / f"{n}.pt"
        path.write_bytes(edited((tmp_path / "sound.pt").read_bytes(), Random(n)))
        with suppress(Error):  # any other exception fails the test
            for array in read_any(path, "torch").points.values():
                array.sum()
