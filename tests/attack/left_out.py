"""What the sweep over torch's operators leaves out, each with its reason. A test compares it with what happens."""

from __future__ import annotations

from collections.abc import Mapping


def _by_operator(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


LEFT_OUT = _by_operator(
    {
        "has no gradients": """
            _chunk_cat all allclose any arange argmax argmin argsort argwhere bmm.triton_optimized bool
            broadcast_shapes bucketize byte cauchy cauchy_ char count_nonzero empty empty_like empty_permuted
            empty_strided eq eq_ equal exponential exponential_ eye floor_divide floor_divide_ full full_like ge ge_
            geometric geometric_ geqrf gt gt_ hash_tensor heaviside heaviside_ histc histogram histogramdd igamma
            igamma_ igammac igammac_ int isclose isfinite isin isinf isnan isneginf isposinf isreal item
            jiterator_2inputs_2outputs jiterator_4inputs_with_extra_args jiterator_binary
            jiterator_binary_return_by_ref jiterator_unary le le_ linalg.ldl_factor linalg.ldl_factor_ex
            linalg.ldl_solve linalg.matrix_rank linalg.matrix_rank.hermitian linspace linspace.tensor_overload
            log_normal log_normal_ logical_and logical_and_ logical_not logical_not_ logical_or logical_or_
            logical_xor logical_xor_ logspace logspace.tensor_overload long lt lt_ masked.argmax masked.argmin
            multinomial ne ne_ new_empty new_empty_strided new_full new_ones new_zeros nonzero nonzero_static
            normal.in_place normal.in_place_ ones ones_like rand_like randint randint_like randn randn_like resize_
            resize__ resize_as_ resize_as__ scalar_tensor searchsorted short signal.windows.bartlett
            signal.windows.blackman signal.windows.cosine signal.windows.exponential signal.windows.gaussian
            signal.windows.general_cosine signal.windows.general_hamming signal.windows.hamming signal.windows.hann
            signal.windows.kaiser signal.windows.nuttall signbit special.airy_ai special.bessel_j0 special.bessel_j1
            special.bessel_y0 special.bessel_y1 special.chebyshev_polynomial_t special.chebyshev_polynomial_u
            special.chebyshev_polynomial_v special.chebyshev_polynomial_w special.hermite_polynomial_h
            special.hermite_polynomial_he special.laguerre_polynomial_l special.legendre_polynomial_p
            special.modified_bessel_i0 special.modified_bessel_i1 special.modified_bessel_k0
            special.modified_bessel_k1 special.scaled_modified_bessel_k0 special.scaled_modified_bessel_k1
            special.shifted_chebyshev_polynomial_t special.shifted_chebyshev_polynomial_u
            special.shifted_chebyshev_polynomial_v special.shifted_chebyshev_polynomial_w
            special.spherical_bessel_j0 special.zeta uniform uniform_ unique unique_consecutive zeros zeros_like
        """,
        "has no such dtype": """
            __rand__ __ror__ __rxor__ bincount bitwise_and bitwise_and_ bitwise_left_shift bitwise_left_shift_
            bitwise_not bitwise_not_ bitwise_or bitwise_or_ bitwise_right_shift bitwise_right_shift_ bitwise_xor
            bitwise_xor_ gcd gcd_ imag istft lcm lcm_ nn.functional.batch_norm.without_cudnn nn.functional.one_hot
            nn.functional.silu.complex nn.functional.silu.complex_ torch._scaled_mm torch._scaled_mm_v2
            torch.ops.aten._efficient_attention_forward torch.ops.aten._flash_attention_forward tril_indices
            triu_indices unravel_index view_as_real
        """,
        "plain fails: NotImplementedError": """
            acosh_ asinh_ atanh_
        """,
        "plain fails: RuntimeError": """
            as_strided.partial_views as_strided.partial_views_ float_power_ linalg.eig sgn sgn_
        """,
    }
)
"""Operators and in-place variants of which no gradients are compared, float32, and why."""

WITHOUT_RECIPE = _by_operator(
    {
        "it makes no storage": """
            H T allclose as_strided atleast_1d atleast_2d atleast_3d broadcast_shapes broadcast_tensors broadcast_to
            chunk conj conj_physical contiguous diagonal dsplit equal expand expand_as flatten hsplit item
            linalg.diagonal mH mT meshgrid.list_of_tensors meshgrid.variadic_tensors movedim narrow
            nn.functional.alpha_dropout nn.functional.alpha_dropout_ nn.functional.dropout nn.functional.dropout2d
            nn.functional.dropout2d_ nn.functional.dropout3d nn.functional.dropout_
            nn.functional.feature_alpha_dropout.without_train nn.functional.feature_alpha_dropout.without_train_
            permute positive ravel real reshape reshape_as resolve_conj resolve_neg select slice split
            split.list_args split_with_sizes squeeze squeeze.multiple t tensor_split to_sparse transpose unbind
            unflatten unfold unsafe_chunk unsafe_split unsqueeze view view_as view_as_complex vsplit
        """,
        "mutated": """
            as_strided_ nn.functional.rrelu_ resize_ resize__ resize_as_ resize_as__
        """,
        "plain fails: AssertionError": """
            jiterator_2inputs_2outputs jiterator_4inputs_with_extra_args jiterator_binary
            jiterator_binary_return_by_ref jiterator_unary
        """,
        "plain fails: NotImplementedError": """
            sparse.mm.reduce sparse.sampled_addmm
        """,
        "plain fails: RuntimeError": """
            as_strided.partial_views as_strided.partial_views_ float_power_
        """,
        "random": """
            bernoulli cauchy cauchy_ exponential exponential_ geometric geometric_ log_normal log_normal_
            multinomial nn.functional.rrelu normal normal.in_place normal.in_place_ normal.number_mean rand_like
            randint randint_like randn randn_like uniform uniform_
        """,
        "uninitialised": """
            empty empty_like empty_permuted empty_strided new_empty new_empty_strided
            nn.functional.binary_cross_entropy nn.functional.mse_loss nn.functional.pad.circular
            nn.functional.smooth_l1_loss nn.functional.soft_margin_loss
        """,
    }
)
"""Those of which no storage has a recipe to compare, and why."""
