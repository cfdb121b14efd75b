"""One layer on one rank: its operators with their times, what they save, and how that is made again.

What: a layer is a row of operators. Each reads saved activations in its backward, makes others, and takes as long as
the roofline of its products or of its traffic says. Kernels are those of the field: fused norms, fused attention,
grouped products for experts; a rank has its tensor, context and expert part of each.
Backward: a product takes as long again for the gradient of its input, and once more for that of its weight. Attention
does two and a half times the operations of its forward, at the rate of its backward; everything else takes twice as
long.
Collectives stand with the operator that waits for them: `collective` (tensor and context ranks), which nothing hides,
and `exchange` (experts' all-to-all), which a pair can hide.

What the all-to-all brings can be kept or swapped, not recomputed: a rank alone cannot make it again.
Tensor ranks with sequence parallelism gather before, and scatter a sum after, each pair of products: hidden states, or
the short vectors of latent attention. What is gathered once more for the gradient of a weight comes beside the gradient
of the input, and counts nothing.
Not covered: uneven routing (each rank gets as many tokens as it sends), quantising (in the rate of float8), dropout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from lowtide.cluster.layout import Layout, Question
from lowtide.cluster.shape import DENSE
from lowtide.cluster.step import StageTimes, total
from lowtide.timeline.hardware import all_to_all_seconds, ring_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator."""

    name: str
    times: StageTimes
    reads: tuple[str, ...] = ()
    """What its backward reads of what there was before it."""
    makes: tuple[str, ...] = ()
    saves_own: bool = False
    """Its backward reads what it makes, too."""

    @property
    def saves(self) -> tuple[str, ...]:
        """All that its backward reads."""
        return (*self.reads, *(self.makes if self.saves_own else ()))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of one kind on one rank. A search asks each of its sums thousands of times: they are remembered."""

    kind: str
    ops: tuple[Op, ...]
    nbytes: dict[str, int]
    """Of each saved activation."""
    recipes: dict[str, tuple[float, tuple[str, ...]]]
    """What makes it again: seconds, and from what."""
    last_uses: dict[str, int]
    """Operators after which the forward itself no longer needs the residual stream: name -> number."""
    temporary_bytes: int
    parameters: int
    """Of this rank, without routed experts."""
    expert_parameters: int

    @cached_property
    def times(self) -> StageTimes:
        """Of a stage of this layer alone."""
        return total(op.times for op in self.ops)

    @cached_property
    def saved_bytes(self) -> int:
        """Of one micro-batch, with everything kept."""
        return sum(self.nbytes.values())

    @cached_property
    def read_bytes(self) -> int:
        """The most that the backward of one operator reads."""
        return max(sum(self.nbytes[name] for name in op.saves) for op in self.ops)

    @cached_property
    def spans(self) -> dict[str, tuple[int, int, int]]:
        """Of each saved activation, in operators of the forward: where it is made, where it is saved, and where the
        forward no longer needs it."""
        made = {"x1": -1} | {name: number for number, op in enumerate(self.ops) for name in op.makes}
        users = {name: [number for number, op in enumerate(self.ops) if name in op.saves] for name in made}
        return {name: (made[name], own[0], self.last_uses.get(name, own[-1] + 1)) for name, own in users.items()}

    @cached_property
    def reads(self) -> dict[str, list[int]]:
        """Of each, the operators of the backward that read it."""
        backward = self.ops[::-1]
        return {name: [number for number, op in enumerate(backward) if name in op.saves] for name in self.spans}

    @cached_property
    def retained_input_bytes(self) -> int:
        """Of what no recipe makes again."""
        return sum(nbytes for name, nbytes in self.nbytes.items() if name not in self.recipes)


def make_layer(question: Question, layout: Layout, kind: str) -> Layer:
    """A layer of this kind. The rates of the device are those of `question`."""
    maker, shape = _Maker(question, layout), question.shape
    maker.attention()
    if kind == DENSE:
        maker.mlp(shape.inner, maker.tokens, layout.tensor, "")
    else:
        maker.experts()
    parameters, expert_parameters = shape.layer_parameters(kind)
    # Attention and dense MLPs are split over tensor ranks; router and shared experts are on each of them, and so are
    # the matrices that make short vectors.
    split = (parameters if kind == DENSE else shape.attention_parameters()) - shape.latent_parameters
    largest = max(nbytes for name, nbytes in maker.nbytes.items() if name in maker.inner_names)
    return Layer(
        kind=kind,
        ops=tuple(maker.ops),
        nbytes=maker.nbytes,
        recipes=maker.recipes,
        last_uses={"x1": maker.num_attention_ops, "x2": len(maker.ops)},
        temporary_bytes=3 * largest + 2 * maker.nbytes["x1"],
        parameters=split // layout.tensor + parameters - split,
        expert_parameters=expert_parameters // layout.expert,
    )


@dataclass(slots=True)
class _Maker:
    """A layer while it is written down, operator by operator."""

    question: Question
    layout: Layout
    ops: list[Op] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=dict)
    recipes: dict[str, tuple[float, tuple[str, ...]]] = field(default_factory=dict)
    inner_names: list[str] = field(default_factory=list)
    """What activation functions make: the widest tensors, in whose backward the most temporaries are."""
    num_attention_ops: int = 0
    tokens: int = field(init=False)
    residual_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.question.tokens(self.layout)
        self.residual_tokens = self.question.residual_tokens(self.layout)

    # ---- parts of a layer

    def attention(self) -> None:
        shape, tokens, tensor = self.question.shape, self.tokens, self.layout.tensor
        self.nbytes["x1"] = self.question.hand_over_bytes(self.layout)
        self._norm("norm1", "x1", "n1")
        heads, key_heads = shape.heads / tensor, max(shape.key_heads / tensor, 1)
        queries, keys, values = heads * shape.key_width, key_heads * shape.key_width, key_heads * shape.value_width
        if not shape.key_rank:
            self._project("n1", {"q": queries, "k": keys, "v": values}, gathered=True)
        else:
            into_keys = shape.key_rank + shape.rope_width
            if shape.query_rank:
                self._project("n1", {"cq": shape.query_rank}, narrow=True)
                self._project("cq", {"q": queries}, short=shape.query_rank)
            else:
                self._project("n1", {"q": queries}, gathered=True)
            self._project("n1", {"ckv": into_keys}, narrow=True)
            self._project("ckv", {"k": keys, "v": values}, short=into_keys, columns=shape.up_columns / tensor)
        self._attend(heads)
        out = tokens * heads * shape.value_width
        self._product(
            "projection", ("a",), out * shape.hidden, out + tokens * shape.hidden,
            heads * shape.value_width * shape.hidden, makes=("x2",), collective=self._sum_seconds(),
        )  # fmt: skip
        self._made("x2", self.nbytes["x1"], "x1", "a")
        self.num_attention_ops = len(self.ops)
        self._norm("norm2", "x2", "n2")

    def mlp(self, inner: int, tokens: int, tensor: int, prefix: str, reads: str = "n2") -> None:
        """`prefix` tells several MLPs of a layer apart."""
        hidden, columns = self.question.shape.hidden, inner / tensor
        wide = 2 * columns if self.question.shape.is_gated else columns
        collective = self._tensor_seconds() if tensor > 1 else 0.0
        h, g = f"{prefix}h", f"{prefix}g"
        self._product(
            f"{prefix}up", (reads,), tokens * hidden * wide, tokens * (hidden + wide), hidden * wide, makes=(h,),
            collective=collective,
        )  # fmt: skip
        self._made(h, int(tokens * wide) * self._saved_width(), reads)
        self._traffic(f"{prefix}act", 2 * tokens * (wide + columns), (h,), (g,))
        self._made(g, int(tokens * columns) * self._saved_width(), h)
        self.inner_names.append(g)
        self._product(
            f"{prefix}down", (g,), tokens * columns * hidden, tokens * (hidden + columns), hidden * columns,
            collective=collective,
        )  # fmt: skip

    def experts(self) -> None:
        question, shape, tokens = self.question, self.question.shape, self.residual_tokens
        experts = shape.experts
        assert experts is not None
        self._product("router", ("n2",), tokens * shape.hidden * experts.num, tokens * shape.hidden, 0, fp8=False)
        if experts.shared_inner:
            self.mlp(experts.shared_inner, tokens, 1, "shared ")
        copies = tokens * experts.top_k
        moved = 2 * 2 * copies * shape.hidden  # rows are put in the order of the experts
        is_fp8 = question.config.precision == "fp8"

        def exchange(width: int) -> float:
            return all_to_all_seconds(
                question.cluster, self.layout.expert, tokens=tokens, vector_bytes=width * shape.hidden,
                top_k=experts.top_k, most_nodes=experts.most_nodes,
            )  # fmt: skip

        self._traffic("dispatch", moved, (), ("d",), exchange=exchange(1 if is_fp8 else 2))
        self.nbytes["d"] = copies * shape.hidden * self._saved_width()
        self.mlp(experts.inner, copies, 1, "expert ", reads="d")
        self._traffic("combine", moved, (), (), exchange=exchange(2))

    # ---- operators

    def _saved_width(self) -> int:
        """Bytes of an element that only a product in low precision reads again."""
        return 1 if self.question.config.precision == "fp8" else 2

    def _tensor_seconds(self) -> float:
        """Gather before, or scattered sum after, the products of tensor ranks. A sum on all of them, which is what
        there is without sequence parallelism, takes both; it stands after the products only, so each place has one."""
        return ring_seconds(self.question.cluster, self.layout.tensor, 2.0 * self.tokens * self.question.shape.hidden)

    def _sum_seconds(self) -> float:
        """After attention. Where no gather stood before it, the sum on all ranks is here as a whole."""
        is_whole = self.question.shape.query_rank > 0 and not self.question.config.sequence_parallel
        return self._tensor_seconds() * (2 if is_whole else 1)

    def _short_seconds(self, width: int) -> float:
        """Gather of the short vectors of all tokens, which each tensor rank made of its part of the sequence."""
        if not self.question.config.sequence_parallel:
            return 0.0
        return ring_seconds(self.question.cluster, self.layout.tensor, 2.0 * self.tokens * width)

    def _norm(self, name: str, reads: str, makes: str) -> None:
        elements = self.residual_tokens * self.question.shape.hidden
        self._traffic(name, 2 * 2 * elements, (reads,), (makes,))
        self._made(makes, elements * self._saved_width(), reads)

    def _project(
        self,
        source: str,
        columns_of: dict[str, float],
        *,
        gathered: bool = False,
        short: int = 0,
        columns: float | None = None,
        narrow: bool = False,
    ) -> None:
        """One product whose columns are several saved activations. `gathered`: of all tokens' hidden states. `short`:
        of all tokens' short vectors of this width. `narrow`: of the rank's part of the tokens, and
        only products read them again."""
        rows = self._rows(source)
        total = sum(columns_of.values()) if columns is None else columns
        tokens = self.residual_tokens if narrow else self.tokens
        self._product(
            "to_" + "".join(columns_of), (source,), tokens * rows * total, tokens * (rows + total), rows * total,
            makes=tuple(columns_of),
            collective=self._tensor_seconds() if gathered else self._short_seconds(short) if short else 0.0,
        )  # fmt: skip
        op = self.ops[-1]
        for name, wide in columns_of.items():
            self.nbytes[name] = int(tokens * wide) * (self._saved_width() if narrow else 2)
            share = wide / sum(columns_of.values())
            self.recipes[name] = (op.times.forward * share + op.times.collective, (source,))

    def _rows(self, source: str) -> float:
        shape = self.question.shape
        return {"cq": shape.query_rank, "ckv": shape.key_rank}.get(source, shape.hidden)

    def _attend(self, heads: float) -> None:
        question, shape, context = self.question, self.question.shape, self.layout.context
        length = question.sequence_length
        # Causal: half of the scores, and of their product with the values.
        flops = self.tokens * length * heads * (shape.key_width + shape.value_width)
        seconds = question.hardware.attention_seconds(flops, 0, "bfloat16", tokens=length)
        back = question.hardware.attention_seconds(2.5 * flops, 0, "bfloat16", tokens=length, is_backward=True)
        exchanged = self.nbytes["k"] + self.nbytes["v"]
        ring = ring_seconds(question.cluster, context, context * exchanged, stride=self.layout.tensor)
        waits = max(0.0, ring - seconds)  # keys come while those that are there are worked on
        times = StageTimes(forward=seconds, backward_input=back, collective=waits)
        self.ops.append(Op(name="attention", times=times, reads=("q", "k", "v"), makes=("a",), saves_own=True))
        self._made("a", int(2 * self.tokens * heads * shape.value_width), "q", "k", "v")

    def _made(self, name: str, nbytes: int, *sources: str) -> None:
        """The last operator has made this, and makes it again from `sources`."""
        self.nbytes[name] = nbytes
        self.recipes[name] = (self.ops[-1].times.ahead, sources)

    def _product(
        self,
        name: str,
        reads: tuple[str, ...],
        multiplications: float,
        elements: float,
        weights: float,
        *,
        makes: tuple[str, ...] = (),
        collective: float = 0.0,
        fp8: bool = True,
    ) -> None:
        dtype = "float8" if fp8 and self.question.config.precision == "fp8" else "bfloat16"
        each = self.question.hardware.op_seconds(2.0 * multiplications, 2.0 * (elements + weights), dtype)
        times = StageTimes(forward=each, backward_input=each, backward_weight=each, collective=collective)
        self.ops.append(Op(name=name, times=times, reads=reads, makes=makes))

    def _traffic(
        self, name: str, nbytes: float, reads: tuple[str, ...], makes: tuple[str, ...], exchange: float = 0.0
    ) -> None:
        seconds = self.question.hardware.op_seconds(0, nbytes, "bfloat16", is_fused=True)
        times = StageTimes(forward=seconds, backward_input=2 * seconds, exchange=exchange)
        self.ops.append(Op(name=name, times=times, reads=reads, makes=makes))
