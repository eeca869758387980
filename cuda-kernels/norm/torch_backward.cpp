// The operators that compute layer_norm's and rms_norm's gradients, from the gradients of y and of the
// returned sum, and from the forward pass's statistics.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "norm/layer_norm_backward/args.h"
#include "norm/layer_norm_backward/parameters.h"
#include "norm/rms_norm_backward/args.h"
#include "operators.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"

namespace {

using at::Tensor;
using namespace kernel_twins;

// For GPUs without clusters: the longest rows of dout and of x, in bytes each, that layer_norm_backward's
// second step there holds in registers. The third step reads longer ones again.
constexpr int64_t PAIR_IN_REGISTERS = 16 * 1024;

constexpr Step<NormBackwardArgs> PARAMETERS = {"parameters", norm_backward_parameters, ">=8.0"};

template <typename Norm>
const Step<NormBackwardArgs>& backward_step(int64_t bytes, int device) {
  if (!Norm::CENTERED) return first_that_runs<rms_norm_backward_steps>("rms_norm_backward", device);
  return first_that_runs<layer_norm_backward_steps>("layer_norm_backward", device,
                                                    bytes > PAIR_IN_REGISTERS ? SECOND : NONE);
}

// How many dimensions precede the normalised ones: as many as the statistics have.
int64_t check_backward(const Tensor& dout, const Tensor& x, const OptionalTensor& mean, const Tensor& rstd,
                       const OptionalTensor& weight, const OptionalTensor& dadded, bool wide) {
  const bool is_double = wide && dout.scalar_type() == at::kDouble;
  if (!is_double) require_dtype("dout", dout, {at::kFloat, at::kBFloat16, at::kHalf});
  require_like("x", x, "dout", dout);
  require_shape_of("x", x, "dout", dout.sym_sizes());
  const int64_t leading = rstd.dim();
  TORCH_CHECK_VALUE(leading < x.dim() && rstd.sym_sizes() == x.sym_sizes().slice(0, leading),
                    "rstd has shape ", tuple(rstd.sym_sizes()),
                    ", must hold the sizes of x's first dimensions: x has shape ", tuple(x.sym_sizes()));
  require_dtype("rstd", rstd, {is_double ? at::kDouble : at::kFloat});
  require_same_device("rstd", rstd, "x", x);
  if (mean) {
    require_like("mean", *mean, "rstd", rstd);
    require_shape_of("mean", *mean, "rstd", rstd.sym_sizes());
  }
  if (weight) {
    require_like("weight", *weight, "x", x);
    require_shape_of("weight", *weight, "a row of x", x.sym_sizes().slice(leading));
  }
  if (dadded) {
    require_like("dadded", *dadded, "x", x);
    require_shape_of("dadded", *dadded, "x", x.sym_sizes());
  }
  return leading;
}

using Backward = Gradients(const Tensor& dout, const Tensor& x, const OptionalTensor& mean,
                           const Tensor& rstd, const OptionalTensor& weight, const OptionalTensor& dadded,
                           bool x_grad, bool weight_grad, bool bias_grad);

template <typename Norm>
Gradients backward_cuda(const Tensor& dout, const Tensor& x, const OptionalTensor& mean, const Tensor& rstd,
                        const OptionalTensor& weight, const OptionalTensor& dadded, bool x_grad,
                        bool weight_grad, bool bias_grad) {
  const int64_t leading = check_backward(dout, x, mean, rstd, weight, dadded, false);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::IntArrayRef sizes = x.sizes();
  const auto empty_or_none = [&](bool wanted, at::IntArrayRef shape) {
    return empty(wanted ? shape : at::IntArrayRef{0}, x.scalar_type(), x.device());
  };
  const at::IntArrayRef row = sizes.slice(leading);
  Gradients out = {empty_or_none(x_grad, sizes), empty_or_none(weight_grad, row),
                   empty_or_none(bias_grad, row)};
  if (!(x_grad || weight_grad || bias_grad)) return out;
  if (x.numel() == 0) {  // the sum of no rows
    out.dweight.zero_();
    out.dbias.zero_();
    return out;
  }
  const Rows dout_rows(dout, leading, x.dim() - leading);
  const Rows rows(x, leading, x.dim() - leading);
  const auto dadded_rows = rows_or_none(dadded, leading);
  const Tensor scale = contiguous_or_none(weight);
  const Tensor dense_mean = contiguous_or_none(mean);
  const Tensor dense_rstd = rstd.contiguous();
  const int64_t N = c10::multiply_integers(sizes.slice(leading));
  Lender lender;
  const Memory memory = lender.memory();
  const auto& step = x_grad ? backward_step<Norm>(N * x.itemsize(), x.get_device()) : PARAMETERS;
  lender.launch(step, {.dout = dout_rows.data(),
                       .x = rows.data(),
                       .weight = data_or_null(scale),
                       .dadded = dadded_rows ? dadded_rows->data() : nullptr,
                       .mean = static_cast<const float*>(data_or_null(dense_mean)),
                       .rstd = dense_rstd.const_data_ptr<float>(),
                       .dx = x_grad ? out.dx.mutable_data_ptr() : nullptr,
                       .dweight = weight_grad ? out.dweight.mutable_data_ptr() : nullptr,
                       .dbias = bias_grad ? out.dbias.mutable_data_ptr() : nullptr,
                       .M = c10::multiply_integers(sizes.slice(0, leading)),
                       .N = N,
                       .stride_dm = dout_rows.stride(),
                       .stride_xm = rows.stride(),
                       .stride_am = dadded_rows ? dadded_rows->stride() : 0,
                       .dtype = dtype_of(x),
                       .memory = &memory,
                       .stream = lender.stream()});
  return out;
}

template <typename Norm>
Gradients backward_cpu(const Tensor& dout, const Tensor& x, const OptionalTensor& mean, const Tensor& rstd,
                       const OptionalTensor& weight, const OptionalTensor& dadded, bool x_grad,
                       bool weight_grad, bool bias_grad) {
  const int64_t leading = check_backward(dout, x, mean, rstd, weight, dadded, true);
  std::vector<int64_t> kept(x.dim(), 1);
  std::copy_n(x.sizes().begin(), leading, kept.begin());
  const auto [dx, dweight, dbias] =
      backward_aten<Norm>(dout, x, mean ? mean->reshape(kept) : Tensor(), rstd.reshape(kept), weight, dadded,
                          x.dim() - leading, x_grad, weight_grad, bias_grad);
  const auto or_empty = [&](const Tensor& sum) {
    return sum.defined() ? sum.clone() : at::empty({0}, x.options());
  };
  return {x_grad ? dx.contiguous() : or_empty(dx), or_empty(dweight), or_empty(dbias)};
}

template <typename Norm>
Gradients backward_meta(const Tensor& dout, const Tensor& x, const OptionalTensor& mean, const Tensor& rstd,
                        const OptionalTensor& weight, const OptionalTensor& dadded, bool x_grad,
                        bool weight_grad, bool bias_grad) {
  const int64_t leading = check_backward(dout, x, mean, rstd, weight, dadded, is_wide(dout));
  const auto empty_or_none = [&](bool wanted, Shape shape) {
    return wanted ? at::empty_symint(shape, x.options()) : at::empty({0}, x.options());
  };
  const Shape row = x.sym_sizes().slice(leading);
  return {empty_or_none(x_grad, x.sym_sizes()), empty_or_none(weight_grad, row),
          empty_or_none(bias_grad, row)};
}

// The two operators.
template <Backward BACKWARD>
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dout, const Tensor& x,
                                                       const Tensor& mean, const Tensor& rstd,
                                                       const OptionalTensor& weight,
                                                       const OptionalTensor& dadded, bool x_grad,
                                                       bool weight_grad, bool bias_grad) {
  const Gradients out = BACKWARD(dout, x, mean, rstd, weight, dadded, x_grad, weight_grad, bias_grad);
  return {out.dx, out.dweight, out.dbias};
}
template <Backward BACKWARD>
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dout, const Tensor& x, const Tensor& rstd,
                                             const OptionalTensor& weight, const OptionalTensor& dadded,
                                             bool x_grad, bool weight_grad) {
  const Gradients out = BACKWARD(dout, x, std::nullopt, rstd, weight, dadded, x_grad, weight_grad, false);
  return {out.dx, out.dweight};
}

}  // namespace

namespace kernel_twins {

template <typename Norm>
std::pair<Tensor, Tensor> statistics(const Tensor& x, int64_t dims, double eps) {
  const std::vector<int64_t> along = last(dims);
  const Tensor wide = x.to(at::toOpMathType(x.scalar_type()));
  const Tensor mean = Norm::CENTERED ? wide.mean(along, true) : Tensor();
  const Tensor centered = Norm::CENTERED ? wide - mean : wide;
  return {mean, ((centered * centered).mean(along, true) + eps).rsqrt()};
}

template <typename Norm>
Gradients backward_aten(const Tensor& dout, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                        const OptionalTensor& weight, const OptionalTensor& dadded, int64_t dims, bool x_grad,
                        bool weight_grad, bool bias_grad) {
  const std::vector<int64_t> along = last(dims);
  const auto row = x.sym_sizes().slice(x.dim() - dims);
  const auto wide = [](const Tensor& tensor) { return tensor.to(at::toOpMathType(tensor.scalar_type())); };
  const Tensor dy = wide(dout);
  const Tensor xhat = (Norm::CENTERED ? wide(x) - mean : wide(x)) * rstd;
  Gradients out;
  if (x_grad) {
    const Tensor g = weight ? dy * wide(*weight) : dy;
    Tensor dx = g - xhat * (g * xhat).mean(along, true);
    if (Norm::CENTERED) dx = dx - g.mean(along, true);
    dx = dx * rstd;
    if (dadded) dx = dx + wide(*dadded);
    out.dx = dx.to(x.scalar_type());
  }
  const auto summed = [&](const Tensor& rows) { return rows.sum_to_size_symint(row).to(x.scalar_type()); };
  if (weight_grad) out.dweight = summed(dy * xhat);
  if (bias_grad) out.dbias = summed(dy);
  return out;
}

template <typename Norm>
Gradients call_backward(const Tensor& dout, const Tensor& x, const OptionalTensor& mean, const Tensor& rstd,
                        const OptionalTensor& weight, const OptionalTensor& dadded, bool x_grad,
                        bool weight_grad, bool bias_grad) {
  const char* name = Norm::CENTERED ? "layer_norm_backward" : "rms_norm_backward";
  return below_autograd(name, {&dout, or_none(dadded)}, [&] {
    Gradients out;
    if constexpr (Norm::CENTERED) {
      static const auto op = find_operator<decltype(layer_norm_backward<call_backward<Norm>>)>(
          "kernel_twins::layer_norm_backward");
      std::tie(out.dx, out.dweight, out.dbias) =
          op.call(dout, x, *mean, rstd, weight, dadded, x_grad, weight_grad, bias_grad);
    } else {
      static const auto op =
          find_operator<decltype(rms_norm_backward<call_backward<Norm>>)>("kernel_twins::rms_norm_backward");
      std::tie(out.dx, out.dweight) = op.call(dout, x, rstd, weight, dadded, x_grad, weight_grad);
    }
    return out;
  });
}

template decltype(statistics<LayerNorm>) statistics<LayerNorm>;
template decltype(statistics<RmsNorm>) statistics<RmsNorm>;
template decltype(backward_aten<LayerNorm>) backward_aten<LayerNorm>;
template decltype(backward_aten<RmsNorm>) backward_aten<RmsNorm>;
template decltype(call_backward<LayerNorm>) call_backward<LayerNorm>;
template decltype(call_backward<RmsNorm>) call_backward<RmsNorm>;

}  // namespace kernel_twins

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  const auto define = [&](const char* schema) { library.def(schema, {at::Tag::pt2_compliant_tag}); };
  define(
      "layer_norm_backward(Tensor dout, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? dadded, "
      "bool x_grad, bool weight_grad, bool bias_grad) -> (Tensor dx, Tensor dweight, Tensor dbias)");
  define(
      "rms_norm_backward(Tensor dout, Tensor x, Tensor rstd, Tensor? weight, Tensor? dadded, "
      "bool x_grad, bool weight_grad) -> (Tensor dx, Tensor dweight)");
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) {
  library.impl("layer_norm_backward", layer_norm_backward<backward_cuda<LayerNorm>>);
  library.impl("rms_norm_backward", rms_norm_backward<backward_cuda<RmsNorm>>);
}
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) {
  library.impl("layer_norm_backward", layer_norm_backward<backward_cpu<LayerNorm>>);
  library.impl("rms_norm_backward", rms_norm_backward<backward_cpu<RmsNorm>>);
}
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) {
  library.impl("layer_norm_backward", layer_norm_backward<backward_meta<LayerNorm>>);
  library.impl("rms_norm_backward", rms_norm_backward<backward_meta<RmsNorm>>);
}
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("layer_norm_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
}
