// The steps of reduction and reduction_nd, and the operator behind kernel_twins.sum, mean, amax and argmax.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "operators.h"
#include "reduction/reduction/args.h"
#include "reduction/reduction_nd/amax_backward.h"
#include "reduction/reduction_nd/args.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"
#include "torch/steps.h"

namespace {

using at::Tensor;
using namespace kernel_twins;

// -----------------------------------------------------------------------------------------------------------
// Steps
// -----------------------------------------------------------------------------------------------------------

void reduction_step(const std::string& step, const Tensor& x, const Tensor& out) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto& found = find_step("reduction", reduction_steps, step, x);
  size_t workspace_bytes = 0;
  ReductionArgs args{.x = x.const_data_ptr(),
                     .out = out.mutable_data_ptr<float>(),
                     .n = x.numel(),
                     .dtype = dtype_of(x),
                     .workspace = nullptr,
                     .workspace_bytes = &workspace_bytes,
                     .zeroed = nullptr,
                     .stream = c10::cuda::getCurrentCUDAStream()};
  found.launch(args);  // only asks for the size
  Lender lender;
  args.workspace = lender.workspace(workspace_bytes);
  args.zeroed = lender.zeroed();
  lender.launch(found, args);
  mark_written(out);
}

void reduction_nd_step(const std::string& step, const Tensor& x, const Tensor& out,
                       const std::vector<int64_t>& dims, const std::string& kind) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto& found = find_step("reduction_nd", reduction_nd_steps, step, x);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, reduction_args(x, out, reduced_of(dims, x.dim()), reduction_kind_of(kind), memory,
                                      lender.stream()));
  mark_written(out);
}

// -----------------------------------------------------------------------------------------------------------
// The operator
// -----------------------------------------------------------------------------------------------------------

// A call's arguments; axes are counted from the front, and no dims means all.
struct Request {
  ReductionKind kind;
  Reduced reduced;
  std::vector<int64_t> axes;
};

// `wide`: PyTorch will compute, which also accepts float64.
Request check(const Tensor& x, at::IntArrayRef dims, std::string_view kind, bool wide) {
  if (!(wide && x.scalar_type() == at::kDouble)) {
    require_dtype("x", x, {at::kFloat, at::kBFloat16, at::kHalf});
  }
  TORCH_CHECK_VALUE(x.dim() <= MOST_AXES, "x has ", text(x.dim()), " dimensions, must have up to ",
                    text(MOST_AXES), ": pass backend='torch'");
  Request request{reduction_kind_of(kind), reduced_of(dims, x.dim()), {}};
  if (dims.empty()) request.reduced.set();
  for (int64_t axis = 0; axis < x.dim(); ++axis) {
    if (request.reduced[axis]) request.axes.push_back(axis);
  }
  require_elements(x.sym_sizes(), request.reduced, request.kind);
  return request;
}

at::ScalarType dtype_of_result(const Tensor& x, ReductionKind kind) {
  return kind == ReductionKind::argmax ? at::kLong : x.scalar_type();
}

Tensor reduction_cuda(const Tensor& x, at::IntArrayRef dims, bool keepdim, std::string_view kind) {
  const Request request = check(x, dims, kind, false);
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor out =
      empty(reduced_sizes(x.sizes(), request.reduced, keepdim), dtype_of_result(x, request.kind), x.device());
  if (out.numel() == 0) return out;
  const auto& step = first_that_runs<reduction_nd_steps>("reduction_nd", x.get_device());
  Lender lender;
  const Memory memory = lender.memory();
  // A 0-d tensor is one axis of one element.
  lender.launch(step, reduction_args(x.dim() == 0 ? x.view(1) : x, out, request.reduced, request.kind, memory,
                                     lender.stream()));
  return out;
}

// On the CPU, PyTorch computes: code for a GPU can be tried, traced and differentiated without one.
Tensor reduction_cpu(const Tensor& x, at::IntArrayRef dims, bool keepdim, std::string_view kind) {
  const Request request = check(x, dims, kind, true);
  if (x.dim() == 0) return request.kind == ReductionKind::argmax ? at::zeros_like(x, at::kLong) : x.clone();
  switch (request.kind) {
    case ReductionKind::sum:
      return at::sum(x, request.axes, keepdim);
    case ReductionKind::mean:
      return at::mean(x, request.axes, keepdim);
    case ReductionKind::max:
      return at::amax(x, request.axes, keepdim);
    case ReductionKind::argmax:
      break;
  }
  // PyTorch's argmax takes one dimension or all, so several are merged into one.
  std::vector<int64_t> order;
  for (int64_t axis = 0; axis < x.dim(); ++axis) {
    if (!request.reduced[axis]) order.push_back(axis);
  }
  const auto kept = static_cast<int64_t>(order.size());
  order.insert(order.end(), request.axes.begin(), request.axes.end());
  return at::argmax(x.permute(order).flatten(kept), -1)
      .view(reduced_sizes(x.sizes(), request.reduced, keepdim));
}

Tensor reduction_meta(const Tensor& x, at::IntArrayRef dims, bool keepdim, std::string_view kind) {
  const Request request = check(x, dims, kind, is_wide(x));
  return at::empty_symint(reduced_sizes(x.sym_sizes(), request.reduced, keepdim),
                          x.options().dtype(dtype_of_result(x, request.kind)));
}

// -----------------------------------------------------------------------------------------------------------
// The gradient of a maximum, from dout and from out, the maxima, both of x's rank
// -----------------------------------------------------------------------------------------------------------

constexpr int64_t MOST_TIES = UINT32_MAX;  // of an output, which the kernel counts in 32 bits

// Returns the reduced axes.
Request check_backward(const Tensor& dout, const Tensor& x, const Tensor& out, at::IntArrayRef dims,
                       bool wide) {
  const Request request = check(x, dims, "max", wide);
  const auto sizes = reduced_sizes(x.sym_sizes(), request.reduced, true);
  for (const auto& [name, tensor] : {std::pair("dout", &dout), std::pair("out", &out)}) {
    require_same_dtype(name, *tensor, "x", x);
    require_same_device(name, *tensor, "x", x);
    TORCH_CHECK_VALUE(tensor->sym_sizes() == c10::SymIntArrayRef(sizes), name, " has shape ",
                      tuple(tensor->sym_sizes()), ", must have that of x with reduced axes of 1, ",
                      tuple(c10::SymIntArrayRef(sizes)));
  }
  return request;
}

// A maximum's gradient by PyTorch's rule: equal maxima share it evenly, and that of NaN is NaN. PyTorch's sum
// of bools first writes int64s, of which half precision takes a quarter; it is summed in fp32.
Tensor shared(const Tensor& dout, const Tensor& is_largest, const std::vector<int64_t>& axes) {
  Tensor counts = is_largest.to(at::kHalf);
  if (!axes.empty()) counts = counts.sum(axes, /*keepdim=*/true, at::kFloat);  // no axes would mean all
  const Tensor share = (dout / counts).to(dout.scalar_type());
  return at::where(is_largest, share, share * 0);
}

Tensor amax_backward_cuda(const Tensor& dout, const Tensor& x, const Tensor& out, at::IntArrayRef dims) {
  const Request request = check_backward(dout, x, out, dims, false);
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor dx = at::empty_like(x);
  if (dx.numel() == 0) return dx;
  if (x.numel() / out.numel() > MOST_TIES) return dx.copy_(shared(dout, out == x, request.axes));
  const Tensor maxima = out.contiguous(), gradients = dout.contiguous();
  Lender lender;
  const Memory memory = lender.memory();
  AmaxBackwardArgs args{.x = x.const_data_ptr(),
                        .out = maxima.const_data_ptr(),
                        .dout = gradients.const_data_ptr(),
                        .dx = dx.mutable_data_ptr(),
                        .rank = static_cast<int>(x.dim()),
                        .dtype = dtype_of(x),
                        .memory = &memory,
                        .stream = lender.stream()};
  for (int axis = 0; axis < args.rank; ++axis) {
    args.sizes[axis] = x.size(axis);
    args.strides[axis] = x.stride(axis);
    args.targets[axis] = dx.stride(axis);
    args.reduced[axis] = request.reduced[axis];
  }
  reduction_nd_amax_backward(args);
  return dx;
}

Tensor amax_backward_cpu(const Tensor& dout, const Tensor& x, const Tensor& out, at::IntArrayRef dims) {
  const Request request = check_backward(dout, x, out, dims, true);
  return at::empty_like(x).copy_(shared(dout, out == x, request.axes));
}

Tensor amax_backward_meta(const Tensor& dout, const Tensor& x, const Tensor& out, at::IntArrayRef dims) {
  check_backward(dout, x, out, dims, is_wide(x));
  return at::empty_like(x);
}

// -----------------------------------------------------------------------------------------------------------
// Gradients and autocast
// -----------------------------------------------------------------------------------------------------------

Tensor call_amax_backward(const Tensor& dout, const Tensor& x, const Tensor& out, at::IntArrayRef dims) {
  static const auto op = find_operator<decltype(call_amax_backward)>("kernel_twins::amax_backward");
  return below_autograd("amax_backward", {&dout}, [&] { return op.call(dout, x, out, dims); });
}

Tensor call_reduction(const Tensor& x, at::IntArrayRef dims, bool keepdim, std::string_view kind) {
  static const auto op = find_operator<decltype(call_reduction)>("kernel_twins::reduction_nd");
  return op.call(x, dims, keepdim, kind);
}

// Puts the reduced axes back as axes of size 1.
Tensor restored(Tensor tensor, const std::vector<int64_t>& axes, bool keepdim) {
  if (keepdim) return tensor;
  for (const int64_t axis : axes) tensor = tensor.unsqueeze(axis);
  return tensor;
}

class ReductionFunction : public torch::autograd::Function<ReductionFunction> {
 public:
  static constexpr const char* NAME = "ReductionBackward";

  // Can be differentiated again. A sum's and a mean's are small ones, expanded.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (!gradients[0].defined()) return {Tensor()};
    const std::vector<c10::SymInt> sizes = context->saved_data["sizes"].toSymIntVector();
    const std::vector<int64_t> axes = context->saved_data["axes"].toIntVector();
    const bool keepdim = context->saved_data["keepdim"].toBool();
    const auto kind = reduction_kind_of(context->saved_data["kind"].toStringRef());
    Tensor dout = restored(gradients[0], axes, keepdim);
    if (kind == ReductionKind::max) {
      const auto saved = context->get_saved_variables();
      const Tensor &x = saved[0], out = restored(saved[1], axes, keepdim);
      if (!at::GradMode::is_enabled()) return {call_amax_backward(dout, x, out, axes)};
      return {shared(dout, out == x, axes)};  // in PyTorch operations
    }
    if (kind == ReductionKind::mean) {  // divided before it is expanded: few elements
      c10::SymInt count = 1;
      for (const int64_t axis : axes) count *= sizes[axis];
      dout = dout / at::Scalar(count);
    }
    return {dout.expand_symint(sizes)};
  }
};

Tensor reduction_autograd(const Tensor& x, at::IntArrayRef dims, bool keepdim, std::string_view kind) {
  const Tensor none;
  const Tensor& input = kind == "argmax" ? none : x;  // an index has no derivative
  const Tensor out =
      below_autograd("reduction_nd", {&input}, [&] { return call_reduction(x, dims, keepdim, kind); });
  if (compute_requires_grad(input)) {
    record<ReductionFunction>({&input}, {&out}, [&](AutogradContext& context) {
      const Request request = check(x, dims, kind, true);
      if (request.kind == ReductionKind::max) context.save_for_backward({x, out});
      context.saved_data["sizes"] = x.sym_sizes();
      context.saved_data["axes"] = request.axes;
      context.saved_data["keepdim"] = keepdim;
      context.saved_data["kind"] = std::string(kind);
    });
  }
  return out;
}

// As in PyTorch's autocast, a sum of half precision is widened to fp32, and so is the result.
Tensor reduction_autocast(const Tensor& x, at::IntArrayRef dims, bool keepdim, std::string_view kind) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  if (kind != "sum") return call_reduction(x, dims, keepdim, kind);
  return call_reduction(at::autocast::cached_cast(at::kFloat, x, c10::DeviceType::CUDA), dims, keepdim, kind);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  library.def("reduction_nd(Tensor x, int[] dims, bool keepdim, str kind) -> Tensor",
              {at::Tag::pt2_compliant_tag});
  // The operator of a maximum's gradient.
  library.def("amax_backward(Tensor dout, Tensor x, Tensor out, int[] dims) -> Tensor",
              {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) {
  library.impl("reduction_nd", reduction_cuda);
  library.impl("amax_backward", amax_backward_cuda);
}
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) {
  library.impl("reduction_nd", reduction_cpu);
  library.impl("amax_backward", amax_backward_cpu);
}
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) {
  library.impl("reduction_nd", reduction_meta);
  library.impl("amax_backward", amax_backward_meta);
}
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("reduction_nd", reduction_autograd);
  library.impl("amax_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(kernel_twins, AutocastCUDA, library) { library.impl("reduction_nd", reduction_autocast); }

void register_reduction(pybind11::module_& module) {
  define_steps(module, "reduction", reduction_step,
               "out = the sum of x. x: contiguous, any shape, fp32, bf16 or fp16; out: fp32, no dimensions.",
               arg("x"), kw_only(), arg("out"));
  define_steps(
      module, "reduction_nd", reduction_nd_step,
      "out = the sum of x over the axes dims, the mean, the max or the argmax, its place among the reduced "
      "ones. x: 1 to 5 axes, any strides, fp32, bf16 or fp16; out: the other axes, contiguous, of x's dtype, "
      "for argmax int64.",
      arg("x"), kw_only(), arg("out"), arg("dims") = std::vector<int64_t>{-1}, arg("kind") = "sum");
}
