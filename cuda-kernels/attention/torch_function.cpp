// The operators behind kernel_twins.attention and kernel_twins.scaled_dot_product_attention.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "launch_args.h"
#include "operators.h"
#include "plain.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"
#include "torch/rows.h"

using at::Tensor;
using namespace kernel_twins;

namespace {

constexpr int64_t LARGEST_D = 256;
constexpr double INFINITE = std::numeric_limits<double>::infinity();

// In memory, whether a row's neighbour is the same token's row of the next head.
bool heads_are_inner(const Tensor& heads) {
  return TORCH_GUARD_OR_FALSE(heads.sym_stride(1).sym_lt(heads.sym_stride(2)));
}

template <typename Int>
std::vector<Int> shape_in_memory(at::ArrayRef<Int> sizes, bool heads_inner) {
  std::vector<Int> shape(sizes.begin(), sizes.end());
  if (heads_inner) std::swap(shape[1], shape[2]);
  return shape;
}

void check_starts(const char* name, const Tensor& starts, const Tensor& q) {
  require_dtype(name, starts, {at::kInt});
  TORCH_CHECK_VALUE(starts.dim() == 1 && starts.sym_size(0) >= 2, name, " has shape ",
                    tuple(starts.sym_sizes()),
                    ", must have (N + 1,) for N sequences, 1 or more: where each begins, and where the last "
                    "one ends");
  require_same_device(name, starts, "q", q);
}

}  // namespace

double kernel_twins::scale_of(const AttentionOptions& options, const Tensor& q) {
  return options.scale ? *options.scale : 1 / std::sqrt(static_cast<double>(q.size(3)));
}

void kernel_twins::check_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                                   bool wide) {
  for (const auto& [name, tensor] : {std::pair{"q", &q}, std::pair{"k", &k}, std::pair{"v", &v}}) {
    TORCH_CHECK_VALUE(tensor->dim() == 4, name, " has ", text(tensor->dim()),
                      " dimensions, must have 4, [B, H, S, D]: call ", name, ".unsqueeze(0)");
  }
  const auto& d = q.sym_size(3);
  TORCH_CHECK_VALUE(v.sym_sizes() == k.sym_sizes(), "v has shape ", tuple(v.sym_sizes()),
                    ", must have that of k, ", tuple(k.sym_sizes()),
                    ": pass a row for each of k's, and pad a smaller head dimension with zeros");
  TORCH_CHECK_VALUE(k.sym_size(3) == d, "k has a head dimension of ", text(k.sym_size(3)),
                    ", must have q's, ", text(d), ": pad with zeros");
  TORCH_CHECK_VALUE(k.sym_size(0) == q.sym_size(0), "k has a batch of ", text(k.sym_size(0)),
                    ", must have q's, ", text(q.sym_size(0)), ": call expand");
  TORCH_CHECK_VALUE(k.sym_size(1) != 0 && q.sym_size(1) % k.sym_size(1) == 0, "k has ", text(k.sym_size(1)),
                    " heads, must have a number that divides q's ", text(q.sym_size(1)),
                    ": heads are dimension 1 of [B, H, S, D]; call transpose(1, 2) on [B, S, H, D]");
  require_same_device("k", k, "q", q);
  require_same_device("v", v, "q", q);
  if (!(wide && (q.scalar_type() == at::kFloat || q.scalar_type() == at::kDouble))) {
    require_dtype("q", q, {at::kBFloat16, at::kHalf});
  }
  require_same_dtype("k", k, "q", q);
  require_same_dtype("v", v, "q", q);
  TORCH_CHECK_VALUE(d > 0 && d <= LARGEST_D && d % 8 == 0, "q has a head dimension of ", text(d),
                    ", must have a multiple of 8 up to ", text(LARGEST_D), ": pass backend='torch'");
  TORCH_CHECK_VALUE(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(),
                    "cu_seqlens_q and cu_seqlens_k must be given both, or neither");
  if (!cu_seqlens_q) return;
  check_starts("cu_seqlens_q", *cu_seqlens_q, q);
  check_starts("cu_seqlens_k", *cu_seqlens_k, q);
  TORCH_CHECK_VALUE(cu_seqlens_q->sym_size(0) == cu_seqlens_k->sym_size(0), "cu_seqlens_k has ",
                    text(cu_seqlens_k->sym_size(0)), " elements, must have ", text(cu_seqlens_q->sym_size(0)),
                    " like cu_seqlens_q: one for each sequence and one more");
  TORCH_CHECK_VALUE(q.sym_size(0) == 1, "q has a batch of ", text(q.sym_size(0)),
                    ", must have 1 with cu_seqlens_q: pass the tokens as rows");
}

Tensor kernel_twins::aligned(const Tensor& heads) {
  bool whole = heads.stride(3) == 1 && reinterpret_cast<uintptr_t>(heads.const_data_ptr()) % 16 == 0;
  for (int64_t i = 0; i < 3; ++i) {
    whole = whole && (heads.size(i) == 1 || heads.stride(i) * heads.itemsize() % 16 == 0);
  }
  return whole ? heads : heads.clone(at::MemoryFormat::Contiguous);
}

Tensor kernel_twins::empty_heads(const Tensor& like) {
  const bool inner = heads_are_inner(like);
  const Tensor made = at::empty(shape_in_memory(like.sizes(), inner), like.options());
  return inner ? made.transpose(1, 2) : made;
}

Tensor kernel_twins::empty_heads_meta(const Tensor& like) {
  const bool inner = heads_are_inner(like);
  const Tensor made = at::empty_symint(shape_in_memory(like.sym_sizes(), inner), like.options());
  return inner ? made.transpose(1, 2) : made;
}

namespace {

// -----------------------------------------------------------------------------------------------------------
// Forward
// -----------------------------------------------------------------------------------------------------------

using Forward = Results(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                        const OptionalTensor& cu_seqlens_k, const AttentionOptions& options);

Results forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                     const OptionalTensor& cu_seqlens_k, const AttentionOptions& options) {
  check_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, false);
  const c10::cuda::CUDAGuard guard(q.device());
  const Tensor out = empty_heads(q);
  const Tensor lse = empty(q.sizes().slice(0, 3), at::kFloat, q.device());
  if (cu_seqlens_q) {  // no step writes where a token is in no sequence
    out.zero_();
    lse.fill_(-INFINITE);
  }
  if (out.numel() == 0) return {out, lse};
  const Tensor queries = aligned(q), keys = aligned(k), values = aligned(v);
  const Tensor starts = contiguous_or_none(cu_seqlens_q), key_starts = contiguous_or_none(cu_seqlens_k);
  Lender lender;
  const Memory memory = lender.memory();
  AttentionArgs args = args_of(queries, keys, values, if_defined(starts), if_defined(key_starts), out, lse,
                               scale_of(options, q), {.first = options.first, .last = options.last},
                               options.softcap, options.from_end);
  args.memory = &memory;
  args.stream = lender.stream();
  lender.launch(first_that_runs<attention_steps>("attention", q.get_device()), args);
  return {out, lse};
}

// PyTorch's own operations, so that code for a GPU can be tried, traced and differentiated without one.
Results forward_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                    const OptionalTensor& cu_seqlens_k, const AttentionOptions& options) {
  check_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType wide = at::toOpMathType(q.scalar_type());
  const Tensor grouped = q.to(wide).unflatten(1, {k.size(1), q.size(1) / k.size(1)});
  const auto keys = [&](const Tensor& heads) { return cleared(heads, cu_seqlens_k).to(wide).unsqueeze(2); };
  const Tensor scores = scores_of(grouped * scale_of(options, q), keys(k), options.softcap).first;
  const Tensor hidden = hidden_pairs(q, k, cu_seqlens_q, cu_seqlens_k, options, 0, q.size(2));
  const Tensor lse = scores.masked_fill(hidden, -INFINITE).logsumexp(-1);
  const Tensor p = (scores - lse.unsqueeze(-1)).exp().masked_fill(hidden, 0);
  const Tensor out = empty_heads(q);
  out.copy_(at::matmul(p, keys(v)).flatten(1, 2));
  return {out, lse.flatten(1, 2).contiguous()};
}

Results forward_meta(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                     const OptionalTensor& cu_seqlens_k, const AttentionOptions&) {
  check_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, is_wide(q));
  const auto wide = q.options().dtype(at::toOpMathType(q.scalar_type()));
  return {empty_heads_meta(q), at::empty_symint(q.sym_sizes().slice(0, 3), wide)};
}

// The operator, by a function of its options.
template <Forward FORWARD>
Results attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                  const OptionalTensor& cu_seqlens_k, std::optional<double> scale, int64_t first,
                  int64_t last, bool from_end, double softcap, bool deterministic) {
  return FORWARD(q, k, v, cu_seqlens_q, cu_seqlens_k, {scale, first, last, from_end, softcap, deterministic});
}

// Calls the operator that is next in the dispatcher's order.
Results call(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
             const OptionalTensor& cu_seqlens_k, const AttentionOptions& options) {
  static const auto op = find_operator<decltype(attention<call>)>("kernel_twins::attention");
  const auto& [scale, first, last, from_end, softcap, deterministic] = options;
  return op.call(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, first, last, from_end, softcap, deterministic);
}

// The result without lse; see torch/operator.h.
Tensor attention_result(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                        const OptionalTensor& cu_seqlens_k, std::optional<double> scale, int64_t first,
                        int64_t last, bool from_end, double softcap, bool deterministic) {
  return std::get<0>(
      call(q, k, v, cu_seqlens_q, cu_seqlens_k, {scale, first, last, from_end, softcap, deterministic}));
}

// -----------------------------------------------------------------------------------------------------------
// Gradients and autocast
// -----------------------------------------------------------------------------------------------------------

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static constexpr const char* NAME = "AttentionBackward";

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const OptionalTensor dlse = if_defined(gradients[1]);
    if (!gradients[0].defined() && !dlse) return {Tensor(), Tensor(), Tensor()};
    const auto saved = context->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[3], &lse = saved[4];
    const Tensor dout = gradients[0].defined() ? gradients[0] : at::zeros_like(out);
    const Wanted wanted = {context->needs_input_grad(0), context->needs_input_grad(1),
                           context->needs_input_grad(2)};
    auto& kept = context->saved_data;
    const auto [dq, dk, dv] =
        call_attention_backward(dout, dlse, q, k, v, out, lse, if_defined(saved[5]), if_defined(saved[6]),
                                kept["scale"].toOptional<double>(), kept["first"].toInt(),
                                kept["last"].toInt(), kept["from_end"].toBool(), kept["softcap"].toDouble(),
                                kept["deterministic"].toBool(), wanted.q, wanted.k, wanted.v);
    return {wanted.q ? dq : Tensor(), wanted.k ? dk : Tensor(), wanted.v ? dv : Tensor()};
  }
};

Results forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                         const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                         const AttentionOptions& options) {
  const Tensors inputs = {&q, &k, &v};
  const Results results =
      below_autograd("attention", inputs, [&] { return call(q, k, v, cu_seqlens_q, cu_seqlens_k, options); });
  if (compute_requires_grad(q, k, v)) {
    const auto& [out, lse] = results;
    record<AttentionFunction>(inputs, {&out, &lse}, [&](AutogradContext& context) {
      context.save_for_backward({q, k, v, out, lse, *or_none(cu_seqlens_q), *or_none(cu_seqlens_k)});
      context.saved_data["scale"] = options.scale;
      context.saved_data["first"] = options.first;
      context.saved_data["last"] = options.last;
      context.saved_data["from_end"] = options.from_end;
      context.saved_data["softcap"] = options.softcap;
      context.saved_data["deterministic"] = options.deterministic;
    });
  }
  return results;
}

// As PyTorch's scaled_dot_product_attention: operands are cast to autocast's dtype.
Results forward_autocast(const Tensor& q, const Tensor& k, const Tensor& v,
                         const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                         const AttentionOptions& options) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  const auto cast = [](const Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCUDA), tensor,
                                     c10::DeviceType::CUDA);
  };
  return call(cast(q), cast(k), cast(v), cu_seqlens_q, cu_seqlens_k, options);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  // The band's limits lie beyond every key, and a softcap of 0 is none.
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
      "float? scale=None, int first=-2147483648, int last=2147483647, bool from_end=False, "
      "float softcap=0.0, bool deterministic=False) -> (Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "attention_result(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
      "float? scale, int first, int last, bool from_end, float softcap, bool deterministic) -> Tensor out",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) { library.impl("attention", attention<forward_cuda>); }
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) { library.impl("attention", attention<forward_cpu>); }
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) { library.impl("attention", attention<forward_meta>); }
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("attention", attention<forward_autograd>);
}
TORCH_LIBRARY_IMPL(kernel_twins, AutocastCUDA, library) {
  library.impl("attention", attention<forward_autocast>);
}
TORCH_LIBRARY_IMPL(kernel_twins, CompositeImplicitAutograd, library) {
  library.impl("attention_result", attention_result);
}
TORCH_LIBRARY_IMPL(kernel_twins, FuncTorchBatched, library) {  // otherwise vmap would loop over examples
  library.impl("attention_result", attention_result);
}
