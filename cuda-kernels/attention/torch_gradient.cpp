// The operator of attention's gradient: a step of the ladder, and on a CPU scores that are recomputed.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "attention/attention_backward/args.h"
#include "launch_args.h"
#include "operators.h"
#include "plain.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"
#include "torch/rows.h"

using at::Tensor;
using namespace kernel_twins;

namespace {

constexpr int64_t CHUNK = int64_t{1} << 26;  // scores at a time

using Backward = Gradients(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                           const Tensor& v, const Tensor& out, const Tensor& lse,
                           const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                           const AttentionOptions& options, const Wanted& wanted);

Tensor empty_or_none(bool wanted, const Tensor& like) {
  return wanted ? empty_heads(like) : at::empty({0}, like.options());
}

void check_backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& out,
                    const Tensor& lse) {
  for (const auto& [name, tensor] : {std::pair{"dout", &dout}, std::pair{"out", &out}}) {
    require_same_dtype(name, *tensor, "q", q);
    require_same_device(name, *tensor, "q", q);
    TORCH_CHECK_VALUE(tensor->sym_sizes() == q.sym_sizes(), name, " has shape ", tuple(tensor->sym_sizes()),
                      ", must have that of q, ", tuple(q.sym_sizes()));
  }
  for (const auto& [name, tensor] : {std::pair{"dlse", or_none(dlse)}, std::pair{"lse", &lse}}) {
    if (!tensor->defined()) continue;
    require_dtype(name, *tensor, {at::toOpMathType(q.scalar_type())});
    require_same_device(name, *tensor, "q", q);
    TORCH_CHECK_VALUE(tensor->sym_sizes() == q.sym_sizes().slice(0, 3), name, " has shape ",
                      tuple(tensor->sym_sizes()), ", must have the first sizes of q, ", tuple(q.sym_sizes()));
  }
}

// Whether PyTorch's own kernels are made to be, rather than to warn that they are not.
bool is_deterministic() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
}

// -----------------------------------------------------------------------------------------------------------
// The ladder's
// -----------------------------------------------------------------------------------------------------------

Gradients by_step(const Step<AttentionBackwardArgs>& step, const Tensor& dout, const OptionalTensor& dlse,
                  const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                  const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                  const AttentionOptions& options, const Wanted& wanted) {
  const Gradients gradients = {empty_or_none(wanted.q, q), empty_or_none(wanted.k, k),
                               empty_or_none(wanted.v, v)};
  const auto& [dq, dk, dv] = gradients;
  if (!(wanted.q || wanted.k || wanted.v)) return gradients;
  if (cu_seqlens_q) {  // no step writes where a token is in no sequence
    for (const Tensor& each : {dq, dk, dv}) each.zero_();
  }
  const Tensor given = aligned(dout), queries = aligned(q), keys = aligned(k), values = aligned(v);
  const Tensor result = aligned(out), sums = lse.contiguous(), given_sums = contiguous_or_none(dlse);
  const Tensor starts = contiguous_or_none(cu_seqlens_q), key_starts = contiguous_or_none(cu_seqlens_k);
  Lender lender;
  const Memory memory = lender.memory();
  AttentionBackwardArgs args = backward_args_of(
      given, queries, keys, values, result, sums, if_defined(given_sums), if_defined(starts),
      if_defined(key_starts), wanted.q ? dq : Tensor(), wanted.k ? dk : Tensor(), wanted.v ? dv : Tensor(),
      scale_of(options, q), {.first = options.first, .last = options.last}, options.softcap, options.from_end,
      options.deterministic || is_deterministic());
  args.memory = &memory;
  args.stream = lender.stream();
  lender.launch(step, args);
  return gradients;
}

// -----------------------------------------------------------------------------------------------------------
// Recomputed
// -----------------------------------------------------------------------------------------------------------

// From scores in fp32 (in float64 of such operands), a head of k and v at a time, and some of the queries
// that read it.
Gradients recomputed(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                     const Tensor& v, const Tensor& lse, const OptionalTensor& cu_seqlens_q,
                     const OptionalTensor& cu_seqlens_k, const AttentionOptions& options,
                     const Wanted& wanted) {
  const at::ScalarType wide = at::toOpMathType(q.scalar_type());
  const int64_t group = q.size(1) / k.size(1), queries = q.size(2), keys = k.size(2);
  const double scale = scale_of(options, q);
  const Tensor given = cleared(dout, cu_seqlens_q), asking = cleared(q, cu_seqlens_q);
  const Tensor given_sums = dlse ? cleared(dlse->unsqueeze(-1), cu_seqlens_q) : Tensor();
  const Tensor read = cleared(k, cu_seqlens_k), values = cleared(v, cu_seqlens_k);
  const Tensor dq = empty_or_none(wanted.q, q).zero_();
  const Tensor dk = empty_or_none(wanted.k, k), dv = empty_or_none(wanted.v, v);
  const int64_t step = std::max<int64_t>(1, CHUNK / std::max<int64_t>(1, group * keys));
  for (int64_t i = 0; i < k.size(0) * k.size(1); ++i) {
    const int64_t b = i / k.size(1), head = i % k.size(1);
    const Tensor kh = read[b][head].to(wide), vh = values[b][head].to(wide);
    const Tensor dkh = at::zeros_like(kh), dvh = at::zeros_like(vh);
    for (int64_t begin = 0; begin < queries; begin += step) {
      const int64_t end = std::min(begin + step, queries);
      const auto rows = [&](const Tensor& tensor) {  // of the group's heads
        return tensor[b].slice(0, head * group, (head + 1) * group).slice(1, begin, end);
      };
      const Tensor qh = rows(asking).to(wide) * scale, dh = rows(given).to(wide);
      const auto [scores, slope] = scores_of(qh, kh, options.softcap);
      const Tensor hidden = hidden_pairs(q, k, cu_seqlens_q, cu_seqlens_k, options, begin, end);
      const Tensor p = (scores - rows(lse).unsqueeze(-1)).exp().masked_fill(hidden, 0);
      if (wanted.v) dvh.add_(at::matmul(p.mT(), dh).sum(0));
      if (!(wanted.q || wanted.k)) continue;
      const Tensor dp = at::matmul(dh, vh.mT());
      Tensor ds = p * (dp - (p * dp).sum(-1, /*keepdim=*/true));
      if (dlse) ds = ds + p * rows(given_sums);
      if (slope.defined()) ds = ds * slope;
      if (wanted.q) rows(dq).copy_(at::matmul(ds, kh) * scale);
      if (wanted.k) dkh.add_(at::matmul(ds.mT(), qh).sum(0));
    }
    if (wanted.k) dk[b][head].copy_(dkh);
    if (wanted.v) dv[b][head].copy_(dvh);
  }
  return {dq, dk, dv};
}

// -----------------------------------------------------------------------------------------------------------
// The operator
// -----------------------------------------------------------------------------------------------------------

Gradients backward_cuda(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& lse,
                        const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                        const AttentionOptions& options, const Wanted& wanted) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  check_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, false);
  check_backward(dout, dlse, q, out, lse);
  const c10::cuda::CUDAGuard guard(q.device());
  const auto& step = first_that_runs<attention_backward_steps>("attention_backward", q.get_device());
  return by_step(step, dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, options, wanted);
}

Gradients backward_cpu(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                       const Tensor& v, const Tensor& out, const Tensor& lse,
                       const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                       const AttentionOptions& options, const Wanted& wanted) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  check_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, true);
  check_backward(dout, dlse, q, out, lse);
  return recomputed(dout, dlse, q, k, v, lse, cu_seqlens_q, cu_seqlens_k, options, wanted);
}

Gradients backward_meta(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& lse,
                        const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                        const AttentionOptions&, const Wanted& wanted) {
  check_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, is_wide(q));
  check_backward(dout, dlse, q, out, lse);
  const auto made = [](bool wanted, const Tensor& like) {
    return wanted ? empty_heads_meta(like) : at::empty({0}, like.options());
  };
  return {made(wanted.q, q), made(wanted.k, k), made(wanted.v, v)};
}

// The operator, by a function of its options.
template <Backward BACKWARD>
Gradients attention_backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                             const Tensor& v, const Tensor& out, const Tensor& lse,
                             const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                             std::optional<double> scale, int64_t first, int64_t last, bool from_end,
                             double softcap, bool deterministic, bool q_grad, bool k_grad, bool v_grad) {
  return BACKWARD(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
                  {scale, first, last, from_end, softcap, deterministic}, {q_grad, k_grad, v_grad});
}

// The node of a gradient that is to be differentiated.
class RefusedFunction : public torch::autograd::Function<RefusedFunction> {
 public:
  static constexpr const char* NAME = "AttentionBackwardBackward";

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "kernel_twins::attention has no gradient of its gradient: pass backend='torch'");
  }
};

Gradients backward_autograd(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                            const Tensor& v, const Tensor& out, const Tensor& lse,
                            const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                            const AttentionOptions& options, const Wanted& wanted) {
  const auto& [scale, first, last, from_end, softcap, deterministic] = options;
  const Tensors inputs = {&dout, or_none(dlse), &q, &k, &v};
  const Gradients gradients = below_autograd("attention_backward", inputs, [&] {
    return call_attention_backward(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, scale, first,
                                   last, from_end, softcap, deterministic, wanted.q, wanted.k, wanted.v);
  });
  if (compute_requires_grad(dout, dlse, q, k, v)) {
    const auto& [dq, dk, dv] = gradients;
    record<RefusedFunction>(inputs, {&dq, &dk, &dv}, [](AutogradContext&) {});
  }
  return gradients;
}

}  // namespace

Gradients kernel_twins::call_attention_backward(
    const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, std::optional<double> scale, int64_t first, int64_t last,
    bool from_end, double softcap, bool deterministic, bool q_grad, bool k_grad, bool v_grad) {
  static const auto op = find_operator<decltype(call_attention_backward)>("kernel_twins::attention_backward");
  return op.call(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, scale, first, last, from_end,
                 softcap, deterministic, q_grad, k_grad, v_grad);
}

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  library.def(
      "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float? scale, int first, int last, bool from_end, "
      "float softcap, bool deterministic, bool q_grad=True, bool k_grad=True, bool v_grad=True) "
      "-> (Tensor dq, Tensor dk, Tensor dv)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) {
  library.impl("attention_backward", attention_backward<backward_cuda>);
}
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) {
  library.impl("attention_backward", attention_backward<backward_cpu>);
}
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) {
  library.impl("attention_backward", attention_backward<backward_meta>);
}
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("attention_backward", attention_backward<backward_autograd>);
}
