"""What quire uses of Dynamo while it traces, and nothing else of it.

    ENTRY = graph_entry("name", write)      # an object that Dynamo knows how to call
    write(dynamo, arguments)                # is called with a `DynamoTrace` when Dynamo calls it

Dynamo represents every value of the traced program by a variable. A `DynamoTrace` reads variables,
traces functions, and adds calls to the graph. Importing Dynamo takes seconds, so its names are
looked up when it is tracing, which is when it has been imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor, fx

from quire.support.torch_private import mark_constant, named, tree_map

Variable: TypeAlias = Any
"""A variable of Dynamo."""

Write: TypeAlias = Callable[["DynamoTrace", list[Variable]], Variable]

_OPERATORS = "torch._dynamo.variables.higher_order_ops"


def graph_entry(name: str, write: Write) -> Callable[..., Any]:
    """Return an object that stands for `write` in code that Dynamo traces."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{name} is called where Dynamo traces, and nowhere else")

    kind = type(name, (named("torch._ops", "HigherOrderOperator"),), {"__call__": call})
    entry: Callable[..., Any] = kind(name)
    _ENTRIES[name] = write
    return entry


_ENTRIES: dict[str, Write] = {}


def know_entries() -> bool:
    """Make Dynamo know the entries. Dynamo runs this while it traces, and sees the constant True.

    It is called before an entry is.
    """
    known: dict[str, Any] = named(_OPERATORS, "_hop_name_to_variable_class")
    for name, write in _ENTRIES.items():
        if name not in known:
            known[name] = _variable_class(name, write)
    return True


mark_constant(know_entries)


def _variable_class(name: str, write: Write) -> type:
    """Return the class of the variable that stands for an entry."""

    def call_function(
        self: Any, translator: Any, args: Sequence[Variable], kwargs: dict[str, Variable]
    ) -> Variable:
        assert not kwargs, "arguments of an entry have no names"
        return write(DynamoTrace(translator, self.value), list(args))

    base = named(_OPERATORS, "TorchHigherOrderOperatorVariable")
    return type(f"{name}_variable", (base,), {"_HOP_NAME": name, "_call_function": call_function})


class TracedStep(NamedTuple):
    """One operation of a traced function: what it computes from earlier values, and its line."""

    node: fx.Node
    line: tuple[str, int] | None

    def run(self, values: dict[fx.Node, Any]) -> Any:
        """Return what the operation computes."""
        args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), values.__getitem__)
        if self.node.op == "call_method":
            return getattr(args[0], str(self.node.target))(*args[1:], **kwargs)
        return self.node.target(*args, **kwargs)  # type: ignore[operator]


class TracedFunction(NamedTuple):
    """A function of scalars, as Dynamo traced it.

    `outer` has the values that do not depend on the scalars: numbers, and fake tensors that stand
    for the variables in `captured`.
    """

    name: str
    inputs: list[fx.Node]
    steps: list[TracedStep]
    outer: dict[fx.Node, Any]
    captured: dict[int, Variable]  # by id of the fake tensor
    output: Any

    def run(self, reading: Callable[[Any], Any], *scalars: Any) -> Any:
        """Compute the function step by step. `reading(line)` is a context for each step."""
        values = self.outer | dict(zip(self.inputs, scalars, strict=True))
        for step in self.steps:
            with reading(step.line):
                values[step.node] = step.run(values)
        return fx.map_arg(self.output, values.__getitem__)


class DynamoTrace:
    """Dynamo, at a call of an entry in the code that it traces."""

    def __init__(self, translator: Any, entry: Any) -> None:
        self._translator, self._entry = translator, entry

    # --- variables -------------------------------------------------------------------------------

    @staticmethod
    def is_none(variable: Variable) -> bool:
        """Return whether the value is None."""
        return bool(variable.is_python_constant() and variable.as_python_constant() is None)

    @staticmethod
    def constant(variable: Variable) -> Any:
        """Return a value as it is now. If it is or holds a symbol, others compile again."""
        real = variable.realize()
        if hasattr(real, "sym_num"):
            return named("torch.fx.experimental.symbolic_shapes", "guard_scalar")(real.sym_num)
        if isinstance(real, named("torch._dynamo.variables", "TupleVariable")):
            return tuple(map(DynamoTrace.constant, real.items))
        return real.as_python_constant()

    def items(self, variable: Variable) -> list[Variable]:
        """Return the variables of a tuple's entries."""
        return [each.realize() for each in variable.unpack_var_sequence(self._translator)]

    @staticmethod
    def example(variable: Variable) -> Tensor:
        """Return the fake tensor that stands for a tensor."""
        fake: Tensor = _proxy(variable).node.meta["example_value"]
        return fake

    def pair(self, first: bool, second: Variable) -> Variable:
        """Return the variable of the tuple (first, second)."""
        tuples = named("torch._dynamo.variables", "TupleVariable")
        return tuples([self.known(first), second])

    def known(self, value: bool) -> Variable:
        """Return the variable of a value that is known while tracing."""
        return named("torch._dynamo.variables.base", "VariableTracker").build(
            self._translator, value
        )

    def break_graph(self, reason: str) -> NoReturn:
        """Break the graph here; where that is not allowed, Dynamo raises with this reason."""
        named("torch._dynamo.exc", "unimplemented")(
            gb_type="quire: a call that cannot be part of a graph",
            context="",
            explanation=reason,
            hints=["Compile without fullgraph=True to have the call run between graphs."],
        )
        raise AssertionError("Dynamo has raised")

    # --- the graph -------------------------------------------------------------------------------

    def call(self, function: Any, *args: Any) -> Variable:
        """Add a call to the graph. Arguments are variables and constants, perhaps in lists."""
        proxies = tree_map(_proxy, args)
        return self._added("call_function", function, proxies, {})

    def _added(self, op: str, target: Any, args: Any, kwargs: Any) -> Variable:
        proxy = self._translator.output.create_proxy(op, target, tuple(args), dict(kwargs))
        return named("torch._dynamo.variables.builder", "wrap_fx_proxy")(self._translator, proxy)

    # --- functions -------------------------------------------------------------------------------

    def traced(
        self, function: Variable, dtypes: Iterable[torch.dtype], like: Variable
    ) -> TracedFunction:
        """Trace a function of scalars of these dtypes, on the device of `like`."""
        translator = self._translator
        build = named("torch._dynamo.variables.base", "VariableTracker").build
        with named(_OPERATORS, "discard_graph_changes")(translator):
            scalars = [
                like.call_method(
                    translator,
                    "new_empty",
                    [build(translator, [])],
                    {"dtype": build(translator, d)},
                )
                for d in dtypes
            ]
        # In a mod, table[h] with a scalar h is a load and not a view at a number.
        loads = named("torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex")
        # Dynamo would copy the record of all changes to objects and go on with the copy, but its
        # variables of objects' __dict__ keep the old one. So the record stays, and a mod that
        # changes an object must restore it.
        restored = translator.output.side_effects.defer_side_effect_checks()
        with loads(), restored:
            _, graph, lifted = named(_OPERATORS, "speculate_subgraph")(
                translator,
                function,
                scalars,
                {},
                description="a mod of quire",
                source_target=self._entry,
                set_subgraph_inputs="flatten_manual",
                restore_side_effects=False,
            )
        return self._sorted(_name(function), graph, lifted, len(scalars))

    def _sorted(
        self, name: str, graph: fx.Graph, lifted: dict[Any, Any], count: int
    ) -> TracedFunction:
        """Keep what depends on the scalars, and add all else to the user's graph."""
        inner = {inside.node: outside for outside, inside in lifted.items()}
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        inputs = placeholders[:count]
        depends = set(inputs)
        outside: dict[fx.Node, Any] = {node: inner[node] for node in placeholders[count:]}
        steps: list[TracedStep] = []
        (output,) = (node for node in graph.nodes if node.op == "output")
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if any(each in depends for each in node.all_input_nodes):
                depends.add(node)
                steps.append(TracedStep(node, _line(node)))
                continue
            if node.op == "get_attr":
                outside[node] = self._translator.output.create_proxy(node.op, node.target, (), {})
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), outside.__getitem__)
            outside[node] = self._added(node.op, node.target, args, kwargs).as_proxy()
        used = {each for step in steps for each in step.node.all_input_nodes} - depends
        used |= set(output.all_input_nodes) - depends
        captured: dict[int, Variable] = {}
        outer = {node: self._captured(outside[node], captured) for node in used}
        return TracedFunction(
            name=name,
            inputs=inputs,
            steps=steps,
            outer=outer,
            captured=captured,
            output=output.args[0],
        )

    def _captured(self, proxy: Any, captured: dict[int, Variable]) -> Any:
        """Return the fake tensor of a value from outside; a number becomes a tensor."""
        example = proxy.node.meta["example_value"]
        if isinstance(example, torch.SymFloat):
            return float(
                example
            )  # no dtype of a tensor promotes as a number does; another compiles
        if isinstance(example, torch.SymInt):
            number = self._translator.output.create_proxy(
                "call_function", torch.scalar_tensor, (proxy,), {"dtype": torch.int64}
            )
            variable = named("torch._dynamo.variables.builder", "wrap_fx_proxy")(
                self._translator, number
            )
            proxy, example = variable.as_proxy(), self.example(variable)
        if isinstance(example, Tensor):
            captured[id(example)] = proxy
        return example


def _proxy(value: Any) -> Any:
    """Return what stands for a variable in the graph; a proxy or a constant stands for itself."""
    if isinstance(value, fx.Proxy) or not hasattr(value, "as_proxy"):
        return value
    return value.as_proxy()


def _name(function: Variable) -> str:
    """Return the name of a function in the user's code."""
    value = getattr(function, "value", None)
    if value is not None:
        return getattr(value, "__name__", None) or type(value).__name__
    try:
        return str(function.get_name())
    except (AttributeError, NotImplementedError):
        return "mod"


def _line(node: fx.Node) -> tuple[str, int] | None:
    """Return the user's line that an operation came from."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    places = [line for line in lines if line.startswith('File "')]
    if not places:
        return None
    _, name, rest = places[-1].split('"', 2)
    number = rest.removeprefix(", line ").partition(",")[0]
    return (name, int(number)) if number.isdigit() else None
