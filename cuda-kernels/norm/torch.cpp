// The operators behind kernel_twins.layer_norm and kernel_twins.rms_norm; see matmul/torch.cpp for why in
// C++.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "norm/layer_norm/args.h"
#include "norm/layer_norm_backward/args.h"
#include "norm/layer_norm_backward/parameters.h"
#include "norm/rms_norm/args.h"
#include "norm/rms_norm_backward/args.h"
#include "torch/adaptor.h"
#include "torch/autograd_graph.h"
#include "torch/operator.h"
#include "torch/rows.h"

namespace {

using at::Tensor;
using namespace kernel_twins;
using OptionalTensor = std::optional<Tensor>;
using Shape = c10::SymIntArrayRef;

// For GPUs without clusters: the longest rows that steps hold, in bytes. Longer ones are read again.
constexpr int64_t ROW_IN_REGISTERS = 64 * 1024;
constexpr int64_t PAIR_IN_REGISTERS = 16 * 1024;  // each of dout's and x's

constexpr Step<NormBackwardArgs> PARAMETERS = {"parameters", norm_backward_parameters, ">=8.0"};

// Which of the two norms an operator is of, and the steps behind it, by the bytes of a row.
struct LayerNorm {
  static constexpr bool CENTERED = true;

  static const auto& forward_step(int64_t bytes, int device) {
    const bool large = bytes > ROW_IN_REGISTERS;
    return first_that_runs<layer_norm_steps>(
        "layer_norm", {"v11_laid_early", large ? "v02_welford" : "v04_rows_per_block"}, large, device);
  }
  static const auto& backward_step(int64_t bytes, int device) {
    const bool large = bytes > PAIR_IN_REGISTERS;
    return first_that_runs<layer_norm_backward_steps>(
        "layer_norm_backward", {"v06_rows_ahead", large ? "v01_rows_then_columns" : "v03_pipelined"}, large,
        device);
  }
};
struct RmsNorm {
  static constexpr bool CENTERED = false;

  static const auto& forward_step(int64_t, int device) {
    return first_that_runs<rms_norm_steps>("rms_norm", {"v06_rows_per_warp", "v01_two_passes"}, false,
                                           device);
  }
  static const auto& backward_step(int64_t, int device) {
    return first_that_runs<rms_norm_backward_steps>(
        "rms_norm_backward", {"v04_rows_ahead", "v01_rows_then_columns"}, false, device);
  }
};

// -----------------------------------------------------------------------------------------------------------
// What goes together
// -----------------------------------------------------------------------------------------------------------

// What lies beside another tensor: of its dtype, on its device. Some of PyTorch's norms take several dtypes.
void require_like(const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), name, " is ", dtype_name(tensor.scalar_type()),
                   ", must be ", dtype_name(like.scalar_type()), " like ", like_name, ": call ", name, ".to(",
                   like_name, ".dtype), or pass backend='torch'");
  require_same_device(name, tensor, like_name, like);
}

void require_shape_of(const char* name, const Tensor& tensor, const char* like_name, Shape shape) {
  TORCH_CHECK_VALUE(tensor.sym_sizes() == shape, name, " has shape ", tuple(tensor.sym_sizes()),
                    ", must have that of ", like_name, ", ", tuple(shape));
}

// How many dimensions lie in front of a row's. `wide`: PyTorch computes, which takes float64 too.
int64_t check(const Tensor& x, const OptionalTensor& residual, Shape shape, const OptionalTensor& weight,
              const OptionalTensor& bias, bool wide) {
  if (!(wide && x.scalar_type() == at::kDouble)) {
    require_dtype("x", x, {at::kFloat, at::kBFloat16, at::kHalf});
  }
  TORCH_CHECK_VALUE(!shape.empty(),
                    "normalized_shape is (), must hold 1 or more sizes: those of x's last dimensions");
  const int64_t leading = x.dim() - static_cast<int64_t>(shape.size());
  TORCH_CHECK_VALUE(leading >= 0 && x.sym_sizes().slice(leading) == shape, "normalized_shape is ",
                    tuple(shape), ", must hold the sizes of x's last dimensions: x has shape ",
                    tuple(x.sym_sizes()));
  if (residual) {
    require_like("residual", *residual, "x", x);
    require_shape_of("residual", *residual, "x", x.sym_sizes());
  }
  for (const auto& [name, tensor] : {std::pair{"weight", &weight}, std::pair{"bias", &bias}}) {
    if (!*tensor) continue;
    require_like(name, **tensor, "x", x);
    require_shape_of(name, **tensor, "normalized_shape", shape);
  }
  return leading;
}

// How many dimensions lie in front of a row's: as many as the statistics have.
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

// -----------------------------------------------------------------------------------------------------------
// Forward
// -----------------------------------------------------------------------------------------------------------

// Undefined where there is none: `added` without a residual, `mean` of rms_norm.
struct Normed {
  Tensor y, added, mean, rstd;
};

using Forward = Normed(const Tensor& x, const OptionalTensor& residual, Shape shape,
                       const OptionalTensor& weight, const OptionalTensor& bias, double eps);

const void* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

Tensor contiguous_or_none(const OptionalTensor& tensor) { return tensor ? tensor->contiguous() : Tensor(); }

std::optional<Rows> rows_or_none(const OptionalTensor& tensor, int64_t dim) {
  return tensor ? std::optional<Rows>(std::in_place, *tensor, dim, tensor->dim() - dim) : std::nullopt;
}

template <typename Norm>
Normed forward_cuda(const Tensor& x, const OptionalTensor& residual, Shape shape,
                    const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const int64_t leading = check(x, residual, shape, weight, bias, false);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::IntArrayRef sizes = x.sizes();
  const int64_t M = c10::multiply_integers(sizes.slice(0, leading));
  const int64_t N = c10::multiply_integers(sizes.slice(leading));
  Normed out;
  out.y = empty(sizes, x.scalar_type(), x.device());
  if (residual) out.added = empty(sizes, x.scalar_type(), x.device());
  if (Norm::CENTERED) out.mean = empty(sizes.slice(0, leading), at::kFloat, x.device());
  out.rstd = empty(sizes.slice(0, leading), at::kFloat, x.device());
  if (x.numel() == 0) {  // the mean of nothing
    out.rstd.fill_(std::numeric_limits<float>::quiet_NaN());
    if (Norm::CENTERED) out.mean.copy_(out.rstd);
    return out;
  }
  const Rows rows(x, leading, x.dim() - leading);
  const auto residual_rows = rows_or_none(residual, leading);
  const Tensor scale = contiguous_or_none(weight);
  const Tensor shift = contiguous_or_none(bias);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(Norm::forward_step(N * x.itemsize(), x.get_device()),
                {.x = rows.data(),
                 .residual = residual_rows ? residual_rows->data() : nullptr,
                 .weight = data_or_null(scale),
                 .bias = data_or_null(shift),
                 .out = out.y.mutable_data_ptr(),
                 .added = residual ? out.added.mutable_data_ptr() : nullptr,
                 .mean = Norm::CENTERED ? out.mean.template mutable_data_ptr<float>() : nullptr,
                 .rstd = out.rstd.mutable_data_ptr<float>(),
                 .M = M,
                 .N = N,
                 .stride_xm = rows.stride(),
                 .stride_rm = residual_rows ? residual_rows->stride() : 0,
                 .dtype = dtype_of(x),
                 .eps = static_cast<float>(eps),
                 .memory = &memory,
                 .stream = lender.stream()});
  return out;
}

std::vector<int64_t> last(int64_t dims) {
  std::vector<int64_t> found(dims);
  std::iota(found.begin(), found.end(), -dims);
  return found;
}

// Mean (undefined for rms_norm) and rstd in fp32 or fp64, the rows' dimensions kept, in operations that can
// be differentiated.
template <typename Norm>
std::pair<Tensor, Tensor> statistics(const Tensor& x, int64_t dims, double eps) {
  const std::vector<int64_t> along = last(dims);
  const Tensor wide = x.to(at::toOpMathType(x.scalar_type()));
  const Tensor mean = Norm::CENTERED ? wide.mean(along, true) : Tensor();
  const Tensor centered = Norm::CENTERED ? wide - mean : wide;
  return {mean, ((centered * centered).mean(along, true) + eps).rsqrt()};
}

// PyTorch's own: what was written for a GPU can be tried, traced and differentiated without one.
template <typename Norm>
Normed forward_cpu(const Tensor& x, const OptionalTensor& residual, Shape shape, const OptionalTensor& weight,
                   const OptionalTensor& bias, double eps) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const int64_t leading = check(x, residual, shape, weight, bias, true);
  const Tensor added = residual ? (x + *residual).contiguous() : Tensor();
  const Tensor& row = residual ? added : x;
  const Tensor y = Norm::CENTERED ? at::layer_norm_symint(row, shape, weight, bias, eps)
                                  : at::rms_norm_symint(row, shape, weight, eps);
  const auto [mean, rstd] = statistics<Norm>(row, x.dim() - leading, eps);
  const at::IntArrayRef stats = x.sizes().slice(0, leading);
  return {y.contiguous(), added, Norm::CENTERED ? mean.reshape(stats) : Tensor(), rstd.reshape(stats)};
}

template <typename Norm>
Normed forward_meta(const Tensor& x, const OptionalTensor& residual, Shape shape,
                    const OptionalTensor& weight, const OptionalTensor& bias, double) {
  const int64_t leading = check(x, residual, shape, weight, bias, is_wide(x));
  const auto like_x = [&] { return at::empty_symint(x.sym_sizes(), x.options()); };
  const auto like_rows = [&] {
    const auto wide = x.options().dtype(at::toOpMathType(x.scalar_type()));
    return at::empty_symint(x.sym_sizes().slice(0, leading), wide);
  };
  return {like_x(), residual ? like_x() : Tensor(), Norm::CENTERED ? like_rows() : Tensor(), like_rows()};
}

// The four operators, by one function that knows what is not there.
template <Forward FORWARD>
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, Shape shape, const OptionalTensor& weight,
                                              const OptionalTensor& bias, double eps) {
  const Normed out = FORWARD(x, std::nullopt, shape, weight, bias, eps);
  return {out.y, out.mean, out.rstd};
}
template <Forward FORWARD>
std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                                          Shape shape, const OptionalTensor& weight,
                                                          const OptionalTensor& bias, double eps) {
  const Normed out = FORWARD(x, residual, shape, weight, bias, eps);
  return {out.y, out.added, out.mean, out.rstd};
}
template <Forward FORWARD>
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, Shape shape, const OptionalTensor& weight, double eps) {
  const Normed out = FORWARD(x, std::nullopt, shape, weight, std::nullopt, eps);
  return {out.y, out.rstd};
}
template <Forward FORWARD>
std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, Shape shape,
                                                const OptionalTensor& weight, double eps) {
  const Normed out = FORWARD(x, residual, shape, weight, std::nullopt, eps);
  return {out.y, out.added, out.rstd};
}

// Whichever of them is next in the dispatcher's order.
template <typename Norm>
Normed call(const Tensor& x, const OptionalTensor& residual, Shape shape, const OptionalTensor& weight,
            const OptionalTensor& bias, double eps) {
  Normed out;
  if constexpr (Norm::CENTERED) {
    if (residual) {
      static const auto op =
          find_operator<decltype(add_layer_norm<call<Norm>>)>("kernel_twins::add_layer_norm");
      std::tie(out.y, out.added, out.mean, out.rstd) = op.call(x, *residual, shape, weight, bias, eps);
    } else {
      static const auto op = find_operator<decltype(layer_norm<call<Norm>>)>("kernel_twins::layer_norm");
      std::tie(out.y, out.mean, out.rstd) = op.call(x, shape, weight, bias, eps);
    }
  } else {
    if (residual) {
      static const auto op = find_operator<decltype(add_rms_norm<call<Norm>>)>("kernel_twins::add_rms_norm");
      std::tie(out.y, out.added, out.rstd) = op.call(x, *residual, shape, weight, eps);
    } else {
      static const auto op = find_operator<decltype(rms_norm<call<Norm>>)>("kernel_twins::rms_norm");
      std::tie(out.y, out.rstd) = op.call(x, shape, weight, eps);
    }
  }
  return out;
}

// What the public functions return, and nothing else; see matmul/torch.cpp.
Tensor layer_norm_result(const Tensor& x, Shape shape, const OptionalTensor& weight,
                         const OptionalTensor& bias, double eps) {
  return call<LayerNorm>(x, std::nullopt, shape, weight, bias, eps).y;
}
std::tuple<Tensor, Tensor> add_layer_norm_result(const Tensor& x, const Tensor& residual, Shape shape,
                                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                                 double eps) {
  const Normed out = call<LayerNorm>(x, residual, shape, weight, bias, eps);
  return {out.y, out.added};
}
Tensor rms_norm_result(const Tensor& x, Shape shape, const OptionalTensor& weight, double eps) {
  return call<RmsNorm>(x, std::nullopt, shape, weight, std::nullopt, eps).y;
}
std::tuple<Tensor, Tensor> add_rms_norm_result(const Tensor& x, const Tensor& residual, Shape shape,
                                               const OptionalTensor& weight, double eps) {
  const Normed out = call<RmsNorm>(x, residual, shape, weight, std::nullopt, eps);
  return {out.y, out.added};
}

// -----------------------------------------------------------------------------------------------------------
// Backward: from the gradients of y and of the returned sum, and from what the forward pass found
// -----------------------------------------------------------------------------------------------------------

// Of no elements where nobody asks: an operator returns tensors.
struct Gradients {
  Tensor dx, dweight, dbias;
};

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
  const auto& step = x_grad ? Norm::backward_step(N * x.itemsize(), x.get_device()) : PARAMETERS;
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

// In operations that can be differentiated again; mean and rstd as `statistics` returns them.
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

// -----------------------------------------------------------------------------------------------------------
// Gradients and autocast
// -----------------------------------------------------------------------------------------------------------

template <typename Norm>
class NormFunction : public torch::autograd::Function<NormFunction<Norm>> {
 public:
  static constexpr const char* NAME = Norm::CENTERED ? "LayerNormBackward" : "RmsNormBackward";

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Tensor& dy = gradients[0];
    const OptionalTensor dadded =
        gradients.size() > 1 && gradients[1].defined() ? OptionalTensor(gradients[1]) : std::nullopt;
    const bool x_grad = context->needs_input_grad(0) || context->needs_input_grad(1);  // or residual's
    Gradients out;
    if (dy.defined()) {
      const auto saved = context->get_saved_variables();
      const Tensor& x = saved[0];
      const OptionalTensor weight = saved[3].defined() ? OptionalTensor(saved[3]) : std::nullopt;
      const bool weight_grad = context->needs_input_grad(2);
      const bool bias_grad = context->needs_input_grad(3);
      if (at::GradMode::is_enabled()) {
        const int64_t dims = x.dim() - saved[2].dim();
        const auto [mean, rstd] = statistics<Norm>(x, dims, context->saved_data["eps"].toDouble());
        out = backward_aten<Norm>(dy, x, mean, rstd, weight, dadded, dims, x_grad, weight_grad, bias_grad);
      } else {
        const OptionalTensor mean = Norm::CENTERED ? OptionalTensor(saved[1]) : std::nullopt;
        out = call_backward<Norm>(dy, x, mean, saved[2], weight, dadded, x_grad, weight_grad, bias_grad);
      }
      if (!x_grad) out.dx = Tensor();
      if (!weight_grad) out.dweight = Tensor();
      if (!bias_grad) out.dbias = Tensor();
    } else if (dadded) {
      out.dx = *dadded;
    }
    return {out.dx, context->needs_input_grad(1) ? out.dx : Tensor(), out.dweight, out.dbias};
  }
};

template <typename Norm>
Normed forward_autograd(const Tensor& x, const OptionalTensor& residual, Shape shape,
                        const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const Tensors inputs = {&x, or_none(residual), or_none(weight), or_none(bias)};
  const Normed out = below_autograd(Norm::CENTERED ? "layer_norm" : "rms_norm", inputs,
                                    [&] { return call<Norm>(x, residual, shape, weight, bias, eps); });
  if (compute_requires_grad(x, residual, weight, bias)) {
    // No gradient flows through the statistics, nor through the sum of an x and a residual that want none.
    const Tensor sum = compute_requires_grad(x, residual) ? out.added : Tensor();
    record<NormFunction<Norm>>(inputs, {&out.y, &sum}, [&](AutogradContext& context) {
      context.save_for_backward({residual ? out.added : x, out.mean, out.rstd, *or_none(weight)});
      context.saved_data["eps"] = eps;
    });
  }
  return out;
}

// As PyTorch's layer_norm: on a GPU, half precision is widened, and so is the result. Its rms_norm takes what
// it is given.
Normed forward_autocast(const Tensor& x, const OptionalTensor& residual, Shape shape,
                        const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  const auto widened = [](const auto& tensor) {
    return at::autocast::cached_cast(at::kFloat, tensor, c10::DeviceType::CUDA);
  };
  return call<LayerNorm>(widened(x), widened(residual), shape, widened(weight), widened(bias), eps);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kernel_twins, library) {
  const auto define = [&](const char* schema) { library.def(schema, {at::Tag::pt2_compliant_tag}); };
  define(
      "layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) "
      "-> (Tensor y, Tensor mean, Tensor rstd)");
  define(
      "add_layer_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
      "float eps) -> (Tensor y, Tensor added, Tensor mean, Tensor rstd)");
  define(
      "rms_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight, float eps) -> (Tensor y, Tensor rstd)");
  define(
      "add_rms_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight, float eps) "
      "-> (Tensor y, Tensor added, Tensor rstd)");
  define(
      "layer_norm_result(Tensor x, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) "
      "-> Tensor y");
  define(
      "add_layer_norm_result(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight, "
      "Tensor? bias, float eps) -> (Tensor y, Tensor added)");
  define("rms_norm_result(Tensor x, SymInt[] normalized_shape, Tensor? weight, float eps) -> Tensor y");
  define(
      "add_rms_norm_result(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? weight, float eps) "
      "-> (Tensor y, Tensor added)");
  // What their gradients are made of.
  define(
      "layer_norm_backward(Tensor dout, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? dadded, "
      "bool x_grad, bool weight_grad, bool bias_grad) -> (Tensor dx, Tensor dweight, Tensor dbias)");
  define(
      "rms_norm_backward(Tensor dout, Tensor x, Tensor rstd, Tensor? weight, Tensor? dadded, "
      "bool x_grad, bool weight_grad) -> (Tensor dx, Tensor dweight)");
}
TORCH_LIBRARY_IMPL(kernel_twins, CUDA, library) {
  library.impl("layer_norm", layer_norm<forward_cuda<LayerNorm>>);
  library.impl("add_layer_norm", add_layer_norm<forward_cuda<LayerNorm>>);
  library.impl("rms_norm", rms_norm<forward_cuda<RmsNorm>>);
  library.impl("add_rms_norm", add_rms_norm<forward_cuda<RmsNorm>>);
  library.impl("layer_norm_backward", layer_norm_backward<backward_cuda<LayerNorm>>);
  library.impl("rms_norm_backward", rms_norm_backward<backward_cuda<RmsNorm>>);
}
TORCH_LIBRARY_IMPL(kernel_twins, CPU, library) {
  library.impl("layer_norm", layer_norm<forward_cpu<LayerNorm>>);
  library.impl("add_layer_norm", add_layer_norm<forward_cpu<LayerNorm>>);
  library.impl("rms_norm", rms_norm<forward_cpu<RmsNorm>>);
  library.impl("add_rms_norm", add_rms_norm<forward_cpu<RmsNorm>>);
  library.impl("layer_norm_backward", layer_norm_backward<backward_cpu<LayerNorm>>);
  library.impl("rms_norm_backward", rms_norm_backward<backward_cpu<RmsNorm>>);
}
TORCH_LIBRARY_IMPL(kernel_twins, Meta, library) {
  library.impl("layer_norm", layer_norm<forward_meta<LayerNorm>>);
  library.impl("add_layer_norm", add_layer_norm<forward_meta<LayerNorm>>);
  library.impl("rms_norm", rms_norm<forward_meta<RmsNorm>>);
  library.impl("add_rms_norm", add_rms_norm<forward_meta<RmsNorm>>);
  library.impl("layer_norm_backward", layer_norm_backward<backward_meta<LayerNorm>>);
  library.impl("rms_norm_backward", rms_norm_backward<backward_meta<RmsNorm>>);
}
TORCH_LIBRARY_IMPL(kernel_twins, Autograd, library) {
  library.impl("layer_norm", layer_norm<forward_autograd<LayerNorm>>);
  library.impl("add_layer_norm", add_layer_norm<forward_autograd<LayerNorm>>);
  library.impl("rms_norm", rms_norm<forward_autograd<RmsNorm>>);
  library.impl("add_rms_norm", add_rms_norm<forward_autograd<RmsNorm>>);
  library.impl("layer_norm_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(kernel_twins, AutocastCUDA, library) {
  library.impl("layer_norm", layer_norm<forward_autocast>);
  library.impl("add_layer_norm", add_layer_norm<forward_autocast>);
}
TORCH_LIBRARY_IMPL(kernel_twins, CompositeImplicitAutograd, library) {
  library.impl("layer_norm_result", layer_norm_result);
  library.impl("add_layer_norm_result", add_layer_norm_result);
  library.impl("rms_norm_result", rms_norm_result);
  library.impl("add_rms_norm_result", add_rms_norm_result);
}
TORCH_LIBRARY_IMPL(kernel_twins, FuncTorchBatched, library) {  // or vmap would go example by example
  library.impl("layer_norm_result", layer_norm_result);
  library.impl("add_layer_norm_result", add_layer_norm_result);
  library.impl("rms_norm_result", rms_norm_result);
  library.impl("add_rms_norm_result", add_rms_norm_result);
}
