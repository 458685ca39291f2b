"""Every private part of torch that normlab uses exists and does what is expected; only one module uses any.

A test that fails here names what a release of torch has moved, and ``normlab/private_torch.py`` says what it
is for. ``normlab`` cannot be imported then, so the first tests read the file without it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

SRC = Path(__file__).resolve().parents[1] / "src/normlab"
HOME = SRC / "private_torch.py"
TAKEN_AS_THEY_ARE = {
    # optional operators: callers use others where these are missing
    "torch.cpu._is_avx512_bf16_supported",
    "torch.cpu._is_amx_tile_supported",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported",
    "torch.ops.mkldnn._linear_pointwise",
}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def dotted(node: ast.AST) -> str:
    """``torch._C._nn`` for the attribute of an attribute of a name; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def imported(tree: ast.AST) -> dict[str, str]:
    """By each name that an import binds, what it stands for, if that is torch's."""
    meaning = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name if alias.asname else alias.name.partition(".")[0]
                meaning[alias.asname or first] = first
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                meaning[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: full for name, full in meaning.items() if full.partition(".")[0] == "torch"}


def private_names(tree: ast.AST) -> set[str]:
    """The private names of torch that a file imports, or reads as attributes of what it imports."""
    meaning = imported(tree)
    names = set(meaning.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("torch.")}
        first, _, others = dotted(node).partition(".")
        if others and first in meaning:
            names.add(f"{meaning[first]}.{others}")
    private = {name for name in names if is_private(name)}
    return {name for name in private if not any(other.startswith(f"{name}.") for other in private)}


def attributes_of_torch(tree: ast.AST) -> set[str]:
    """The private attributes that a file asks other objects for, such as a tensor or a module."""
    asked = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node.value) not in ("self", "cls"):
            asked.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            asked.add(node.value)  # of getattr and setattr
    return {name for name in asked if name.isidentifier() and is_private(name)}


def resolve(name: str) -> object:
    """Return what a dotted name stands for: modules are imported, the rest are attributes."""
    parts = name.split(".")
    value: object = import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part):
            import_module(".".join(parts[:i]))
        value = getattr(value, part)
    return value


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


NAMES = sorted(private_names(parsed(HOME)))


@pytest.mark.parametrize("name", NAMES)
def test_torch_has_each_private_name(name):
    try:
        resolve(name)
    except (AttributeError, ImportError) as error:
        if name not in TAKEN_AS_THEY_ARE:
            words = f"torch {torch.__version__} has no {name}: mend {HOME.name}, which says what it is for"
            pytest.fail(f"{words} ({error})")


def test_the_names_are_read_from_the_file():
    code = """
import torch
from torch import nn
from torch._functorch import apis as functions
torch._C._nn.f, functions.vmap_impl, nn.Linear
"""
    assert private_names(ast.parse(code)) == {"torch._C._nn.f", "torch._functorch.apis.vmap_impl"}
    asked = attributes_of_torch(ast.parse("p._version, self._x, getattr(p, '_saved_self')"))
    assert asked == {"_version", "_saved_self"}
    assert "torch._C._current_graph_task_id" in NAMES


def test_no_other_file_names_a_private_part_of_torch():
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SRC.rglob("*.py")) if path != HOME}
    # attributes of a tensor or a module do not begin with a name of torch's: those used above are known, but
    # for names that a class, a function or an object of normlab's own has, too
    own = {name for text in texts.values() for name in re.findall(r"(?:def |class |self\.)(_\w+)", text)}
    known = attributes_of_torch(parsed(HOME)) - own
    assert {"_version", "_non_persistent_buffers_set", "_foreach_add_"} <= known
    named = list[str]()
    for path, text in texts.items():
        if "torch" in text:
            tree = ast.parse(text)
            private = private_names(tree) | attributes_of_torch(tree) & known
            named += [f"{path.relative_to(SRC)}: {name}" for name in private]
    assert named == []


# --------------------------------------------------------------------------- what is expected of each of them


@pytest.fixture(scope="module")
def private():
    return import_module("normlab.private_torch")


class Calls(TorchFunctionMode):
    """Notes what is called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_backward_pass_has_a_number_while_it_runs(private):
    numbers = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: numbers.append((private.is_in_backward(), private.backward_pass())))
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert [running for running, _ in numbers] == [True, True]
    assert numbers[0][1] != numbers[1][1]
    assert not private.is_in_backward()


def test_a_write_in_place_raises_the_version_of_a_tensor(private):
    x = torch.ones(2)
    before = private.version_of(x)
    x.add_(1)
    assert private.version_of(x) == before + 1


def test_a_view_leads_to_the_tensor_that_it_views(private):
    x = torch.ones(2, 3)
    assert private.viewed(x.t()[0]) is x
    assert private.viewed(x) is x


def test_a_node_of_the_graph_shows_what_it_saved(private):
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    product = torch.addmm(torch.ones(4), x, w, alpha=3)
    assert private.saved(product.grad_fn, "mat2") is w
    assert private.saved(product.grad_fn, "alpha") == 3
    assert private.saved(product.grad_fn, "other", "none") == "none"
    assert any(value is w for value in private.all_saved(product.grad_fn))
    batches = torch.bmm(x[None], w[None]).grad_fn
    assert private.saved(batches, "self").shape == (1, 2, 3)
    assert private.saved((x * 2.0 * torch.ones(3)).grad_fn, "other").shape == (3,)
    # what is saved as a list is yielded one by one
    written = torch.ones(2, 3, requires_grad=True).index_put((torch.tensor([0]),), torch.ones(3)).grad_fn
    assert any(isinstance(value, torch.Tensor) for value in private.all_saved(written))


def test_switching_gradients_is_seen_by_a_mode(private):
    with Calls() as calls, torch.no_grad():
        pass
    assert private.GRADIENT_SWITCH in calls.seen


def test_the_hooks_of_a_tensor_are_found(private):
    p = nn.Parameter(torch.ones(2))
    assert private.tables_of_hooks(p) == [None, None]
    assert [getattr(p, name) for name in private.TABLES_OF_HOOKS] == [None, None]
    p.register_hook(lambda gradient: gradient)
    p.register_post_accumulate_grad_hook(lambda _: None)
    assert [len(hooks) for hooks in private.tables_of_hooks(p)] == [1, 1]
    assert private.gradient_hooks(p) is private.tables_of_hooks(p)[1]


def test_the_parts_of_a_sparse_tensor_are_found_before_it_is_coalesced(private):
    x = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True)
    indices, values = private.parts_of_sparse(x)
    assert (indices.tolist(), values.tolist()) == ([[0, 0]], [1.0, 2.0])


def test_a_tensor_of_functorch_is_known(private):
    known = []
    torch.func.vmap(lambda row: known.append(private.is_functorch_wrapped(row)) or row)(torch.ones(2, 3))
    assert known == [True]
    assert not private.is_functorch_wrapped(torch.ones(2))


def test_what_runs_without_modes_is_seen_by_none(private):
    with Calls() as calls, private.without_function_modes():
        torch.ones(2).exp()
    assert calls.seen == []


def test_vmap_calls_what_is_patched_for_it(private, monkeypatch):
    owner, name = private.VMAP
    real, seen = getattr(owner, name), []
    mapped = torch.func.vmap(torch.sin)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: seen.append(args[0]) or real(*args, **kwargs))
    assert mapped(torch.ones(2)).shape == (2,)
    assert seen == [torch.sin]


def test_a_functional_gradient_calls_what_is_patched_for_it(private, monkeypatch):
    owner, name = private.FUNCTIONAL_GRADIENT
    real, seen = getattr(owner, name), []
    slope = torch.func.grad(torch.sin)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: seen.append(args[0]) or real(*args, **kwargs))
    assert slope(torch.tensor(0.0)) == 1
    assert seen == [torch.sin]


class Operators:
    """The operators that run inside a block, by what a dispatch mode is told."""

    def __init__(self, private):
        class Mode(private.TorchDispatchMode):
            def __torch_dispatch__(mode, func, types, args=(), kwargs=None) -> Any:
                self.seen.append(func.overloadpacket)
                return func(*args, **(kwargs or {}))

        self.mode, self.seen = Mode(), []


def test_a_dispatch_mode_sees_the_operators_of_softmax_of_bags_and_of_entries(private):
    operators = Operators(private)
    table = torch.ones(5, 3, requires_grad=True)
    at = (torch.tensor([0]),)
    with operators.mode:
        torch.ones(2, 3).softmax(-1)
        assert set(operators.seen) & private.SOFTMAX_OPERATORS
        nn.functional.embedding_bag(torch.tensor([[0, 1]]), table)
        with torch.no_grad():
            nn.functional.embedding_bag(torch.tensor([[0, 1]]), table)
        assert set(operators.seen) & set(private.EMBEDDING_BAG_OPERATORS)
        torch.ops.aten._unsafe_index.Tensor(torch.ones(3), at)
        assert private.UNSAFE_INDEX in operators.seen
        torch.ops.aten._index_put_impl_(torch.ones(3), at, torch.ones(1))
        assert private.INDEX_PUT in operators.seen


def test_torch_multiplies_groups_of_rows_under_one_of_the_names(private):
    assert any(hasattr(where, name) for where in (nn.functional, torch) for name in private.GROUPED_PRODUCTS)


def test_torchs_attention_is_there_while_another_stands_in_its_place(private, monkeypatch):
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", None)
    x = torch.ones(1, 2, 4)
    assert torch.equal(private.attention_kernel()(x, x, x), x)


def test_tensors_that_hold_others_are_known(private):
    masked = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert private.is_traceable_wrapper_subclass(masked)
    assert not private.is_traceable_wrapper_subclass(torch.ones(2))


def test_arguments_are_taken_apart_and_put_together(private):
    leaves, form = private.tree_flatten(({"a": 1}, [2, (3,)]))
    assert leaves == [1, 2, 3]
    assert private.tree_unflatten([4, 5, 6], form) == ({"a": 4}, [5, (6,)])
    assert private.tree_map_only(int, lambda n: n + 1, [1, "b"]) == [2, "b"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(2, 2)
        self.register_buffer("saved", torch.ones(1))
        self.register_buffer("passing", torch.ones(1), persistent=False)
        self.register_parameter("missing", None)

    def forward(self, x):
        return self.second(self.first(x))


def test_the_tables_of_a_module_are_its_own(private):
    net = Net()
    assert set(private.TABLES_OF_MODULES) <= vars(net).keys()
    assert private.table_of_parameters(net) == {"missing": None}
    private.table_of_buffers(net)["saved"] = torch.zeros(1)
    assert not net.saved.any()
    assert list(private.children_of(net)) == ["first", "second"]
    assert private.unsaved_buffers(net) == {"passing"}
    assert private.unsaved_buffers(net) == dict(net.named_buffers()).keys() - net.state_dict().keys()


def test_the_tables_of_forward_hooks_are_those_that_a_call_reads(private):
    net, called = Net(), []
    net.register_forward_pre_hook(lambda *_: called.append("before"))
    net.register_forward_hook(lambda *_: called.append("after"))
    for hooks in private.tables_of_forward_hooks(net):
        assert len(hooks) == 1
        hooks.clear()
    net(torch.ones(1, 2))
    assert called == []


def test_every_global_hook_is_in_one_of_the_tables(private):
    registered = (
        nn.modules.module.register_module_forward_hook(lambda *_: None, with_kwargs=True),
        nn.modules.module.register_module_forward_pre_hook(lambda *_: None),
        nn.modules.module.register_module_full_backward_hook(lambda *_: None),
    )
    variables, kind = private.KIND_OF_GLOBAL_HOOKS
    try:
        for hook in registered:
            assert any(hook.id in table for table in private.TABLES_OF_GLOBAL_HOOKS)
        assert variables[kind] is True
    finally:
        for hook in registered:
            hook.remove()
        private.forget_global_hook(registered[0].id)
        variables[kind] = None
    assert not any(registered[0].id in table for table in private.TABLES_OF_GLOBAL_HOOKS)


def test_dropouts_and_norms_over_batches_have_common_classes(private):
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    assert all(issubclass(kind, private.AnyDropout) for kind in dropouts)
    norms = (nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d)
    assert all(issubclass(kind, private.BatchOrInstanceNorm) for kind in norms)
    assert not issubclass(nn.LayerNorm, private.BatchOrInstanceNorm)


def test_compiled_modules_are_known(private):
    inner = nn.Linear(2, 2)
    assert private.inside_compiled(inner) is None
    assert not private.runs_compiled(inner)
    outer = torch.compile(inner, backend="eager")
    assert private.inside_compiled(outer) is inner
    assert private.runs_compiled(outer)
    assert not private.runs_compiled(inner)
    inner.compile(backend="eager")
    assert private.runs_compiled(inner)
    assert private.compiler_is_loaded()


def test_batches_come_from_what_is_patched_for_them(private):
    data = torch.utils.data.TensorDataset(torch.ones(3, 1))
    assert isinstance(iter(torch.utils.data.DataLoader(data)), private.LoaderIterator)


# --------------------------------------------------------------------------------- optimizers and the process


def test_clipping_by_a_norm_ends_in_one_function(private):
    known_by_name, before, seen = nn.utils.clip_grads_with_norm_, private.clip_by_norm(), []

    def clipped(parameters, max_norm, total_norm, *args, **kwargs):
        seen.append((max_norm, float(total_norm)))

    p = nn.Parameter(torch.ones(4))
    p.grad = torch.full((4,), 2.0)
    assert private.place_of_clip().cell_contents is before
    private.replace_clip_by_norm(clipped)
    try:
        assert private.clip_by_norm() is clipped
        nn.utils.clip_grad_norm_(p, 1.0)
        known_by_name(p, 0.5, torch.tensor(3.0))
    finally:
        private.replace_clip_by_norm(before)
    assert seen == [(1.0, 4.0), (0.5, 3.0)]
    known_by_name(p, 1.0, torch.tensor(4.0))
    assert float(p.grad.norm()) == pytest.approx(1.0, rel=1e-4)


def test_a_scaler_forgets_what_it_unscaled(private):
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    marks = private.marks_of_infinite(scaler, optimizer)
    assert [bool(mark) for mark in marks.values()] == [False]
    private.forget_unscaled(scaler)
    scaler.unscale_(optimizer)  # a second call for the same step would raise
    assert scaler.get_scale() == 4.0


def test_a_schedule_believes_that_its_optimizer_has_stepped(private):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    private.mark_as_stepped(optimizer)
    scheduler.step()  # a warning is an error here


def test_the_parts_and_the_closed_form_of_a_schedule_are_found(private):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    part = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    whole = torch.optim.lr_scheduler.ChainedScheduler([part])
    assert list(private.schedulers_in(whole)) == [part]
    assert list(private.schedulers_in(part)) == []
    part.last_epoch = 3
    assert private.closed_form(part)() == [0.125]
    assert private.closed_form(SimpleNamespace()) is None


def test_many_tensors_are_computed_with_at_once(private):
    x, y = [torch.ones(2), torch.ones(3)], [torch.full((2,), 3.0), torch.full((3,), 3.0)]
    private.add_each(x, y)
    private.subtract_each(x, [torch.ones(2), torch.ones(3)])
    private.divide_each(x, 2.0)
    assert [t.tolist() for t in x] == [[1.5] * 2, [1.5] * 3]
    private.interpolate_each(x, y, 0.5)
    assert x[0].tolist() == [2.25] * 2
    private.copy_each(x, y)
    assert [float(norm) for norm in private.norm_of_each(x)] == pytest.approx([18**0.5, 27**0.5])


def test_the_flags_of_the_backends_are_among_the_pairs(private):
    readers = dict[str, object]()
    for get, put in private.flags():
        assert callable(put)
        readers[get.__name__] = put
    assert {"_get_flash_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_enabled"} <= readers.keys()
    assert "use_flash" in readers["_get_flash_sdp_enabled"].__name__


def test_the_precision_of_float32_is_read_and_set(private):
    read = list[tuple[str, str]]()
    for place in private.PRECISIONS:
        with suppress(RuntimeError):  # "generic" has one for all operations, and none for each
            private.set_precision(*place, private.precision(*place))
            read.append(place)
    assert {("generic", "all"), ("cuda", "matmul"), ("mkldnn", "matmul")} <= set(read)


def test_the_default_device_is_none_until_one_is_set(private):
    assert private.default_device() is None
    with torch.device("meta"):
        assert private.default_device() is None  # a block is not the process
    torch.set_default_device("cpu")
    try:
        assert private.default_device() == torch.device("cpu")
    finally:
        torch.set_default_device(None)


def test_the_stance_of_the_compiler_is_read_and_set(private):
    private.options_of_compiler()
    before = private.stance()
    with torch.compiler.set_stance("force_eager"):
        inside = private.stance()
        assert inside != before
        private.set_stance(before)
        assert private.stance() == before
        private.set_stance(inside)
    assert private.stance() == before


def test_the_compiler_has_limits(private):
    options = private.options_of_compiler()
    assert options.recompile_limit <= options.accumulated_recompile_limit


def test_the_savers_of_torchscript_are_where_they_are_patched(private):
    for module, names in private.JIT_SAVERS.items():
        for name in names:
            assert callable(resolve(f"{module}.{name}"))
    assert torch.jit.save is resolve("torch.jit._serialization.save")


def test_the_gathering_of_gradients_is_a_function_with_a_backward_pass(private):
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    assert issubclass(private.all_gather_function(), torch.autograd.Function)


def test_rows_are_scaled_to_a_length_and_back(private):
    rows, lengths = torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0]])
    scaled, norms = private.weight_norm(rows, lengths)
    assert (scaled.tolist(), norms.item()) == ([[6.0, 8.0]], 5.0)
    of_rows, of_lengths = private.weight_norm_backward(torch.tensor([[3.0, 4.0]]), rows, lengths, norms)
    assert of_lengths.item() == pytest.approx(5.0)
    assert of_rows.abs().max() < 1e-5  # the gradient points along the row, which is scaled to the same length


def test_products_by_onednn_are_those_of_torch(private):
    x, weight, bias = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)
    try:
        product = private.mkldnn_linear(x, weight, bias)
    except (AttributeError, RuntimeError):
        pytest.skip("this torch is built without oneDNN")
    assert torch.equal(product, nn.functional.linear(x, weight, bias))
    assert private.mkldnn_multiplies_bf16() in (True, False)


def test_a_cpu_tells_whether_it_multiplies_bf16(private):
    try:
        assert private.multiplies_bf16_fast() in (True, False)
    except AttributeError:
        pytest.skip("this torch cannot tell, which callers expect")


def used_here() -> Iterator[str]:
    """The names of ``private_torch`` that this file uses."""
    for node in ast.walk(parsed(Path(__file__))):
        if isinstance(node, ast.Attribute) and dotted(node.value) == "private":
            yield node.attr


def test_every_part_is_tested():
    defined = set(import_module("normlab.private_torch").__all__)
    for node in parsed(HOME).body:
        if isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert defined - {"__all__"} - set(used_here()) == set()
