// kernel_twins._C: one checked function an operation. The only file that knows pybind11.
//
// Each function checks its arguments by the rules and in the words of kernel_twins/ops, looks the step up by
// name, and launches it on the current stream of the tensors' device. Steps write into `out` in place and
// have no gradient.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "adaptor.h"
#include "axes.h"
#include "dropout/dropout_add/args.h"
#include "dropout/dropout_add_backward/args.h"
#include "elementwise/vector_add/args.h"
#include "loss/cross_entropy/args.h"
#include "loss/cross_entropy_backward/args.h"
#include "matmul/linear/args.h"
#include "matmul/matmul_bf16/args.h"
#include "matmul/matmul_fp32/args.h"
#include "matmul/matmul_tf32x3/args.h"
#include "norm/layer_norm/args.h"
#include "norm/layer_norm_backward/args.h"
#include "norm/rms_norm/args.h"
#include "norm/rms_norm_backward/args.h"
#include "probes.h"
#include "reduction/reduction/args.h"
#include "reduction/reduction_nd/args.h"
#include "softmax/softmax/args.h"
#include "softmax/softmax_backward/args.h"

namespace {

using at::Tensor;
using namespace kernel_twins;

void vector_add(const std::string& step, const Tensor& a, const Tensor& b, const Tensor& out) {
  require_dtype("a", a, {at::kFloat, at::kBFloat16, at::kHalf});
  require_cuda("a", a);
  require_contiguous("a", a);
  const auto check = [&](const char* name, const Tensor& tensor) {
    require_dtype(name, tensor, {at::kFloat, at::kBFloat16, at::kHalf});
    require_same_dtype(name, tensor, "a", a);
    require_device(name, tensor, "a", a);
    require_shape(name, tensor, a.sizes(), "a, b and out are not broadcast");
    require_contiguous(name, tensor);
  };
  check("b", b);
  check("out", out);
  // Every thread reads its elements before it writes them, so out may be an input, but not one that is
  // shifted.
  if (out.const_data_ptr() != a.const_data_ptr()) require_apart(out, "a", a);
  if (out.const_data_ptr() != b.const_data_ptr()) require_apart(out, "b", b);

  const c10::cuda::CUDAGuard guard(a.device());
  const auto& found = find_step("vector_add", vector_add_steps, step, a);
  found.launch({.a = a.const_data_ptr(),
                .b = b.const_data_ptr(),
                .out = out.mutable_data_ptr(),
                .n = a.numel(),
                .dtype = dtype_of(a),
                .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(out);
}

void reduction(const std::string& step, const Tensor& x, const Tensor& out) {
  require_dtype("x", x, {at::kFloat, at::kBFloat16, at::kHalf});
  require_cuda("x", x);
  require_contiguous("x", x);
  require_dtype("out", out, {at::kFloat});
  require_device("out", out, "x", x);
  require_shape("out", out, {}, "the sum of everything is one number");
  require_apart(out, "x", x);

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

void reduction_nd(const std::string& step, const Tensor& x, const Tensor& out,
                  const std::vector<int64_t>& dims, const std::string& kind_name) {
  require_dtype("x", x, {at::kFloat, at::kBFloat16, at::kHalf});
  require_cuda("x", x);
  TORCH_CHECK_VALUE(1 <= x.dim() && x.dim() <= MOST_AXES, "x has ", text(x.dim()),
                    " dimensions, must have 1 to ", text(MOST_AXES));
  const ReductionKind kind = reduction_kind_of(kind_name);
  const Reduced reduced = reduced_of(dims, x.dim());
  require_elements(x.sizes(), reduced, kind);
  if (kind == ReductionKind::argmax) {
    require_dtype("out", out, {at::kLong});
  } else {
    require_dtype("out", out, {at::kFloat, at::kBFloat16, at::kHalf});
    require_same_dtype("out", out, "x", x);
  }
  require_device("out", out, "x", x);
  require_shape("out", out, reduced_sizes(x.sizes(), reduced, false), "the axes of x that are not in dims");
  require_contiguous("out", out);
  require_apart(out, "x", x);

  const c10::cuda::CUDAGuard guard(x.device());
  const auto& found = find_step("reduction_nd", reduction_nd_steps, step, x);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, reduction_args(x, out, reduced, kind, memory, lender.stream()));
  mark_written(out);
}

// One product for all: they differ in their dtypes alone. out is of a's dtype, or fp32. T as in MatmulArgs.
template <typename T>
void matmul(const char* op, const StepTable<MatmulArgs<T>>& steps,
            std::initializer_list<at::ScalarType> dtypes, const std::string& step, const Tensor& a,
            const Tensor& b, const Tensor& out) {
  const auto require_matrix = [&](const char* name, const Tensor& tensor) {
    require_rank(name, tensor, 2);
    require_device(name, tensor, "a", a);
  };
  require_dtype("a", a, dtypes);
  require_matrix("a", a);
  require_dtype("b", b, dtypes);
  require_same_dtype("b", b, "a", a);
  require_matrix("b", b);
  if (a.scalar_type() == at::kFloat) {
    require_dtype("out", out, {at::kFloat});
  } else {
    require_dtype("out", out, {a.scalar_type(), at::kFloat});
  }
  require_matrix("out", out);
  require_shape("b", b, {a.size(1), b.size(1)}, "its rows are a's columns");
  require_shape("out", out, {a.size(0), b.size(1)}, "a's rows by b's columns");
  require_contiguous("out", out);
  require_apart(out, "a", a);
  require_apart(out, "b", b);

  const c10::cuda::CUDAGuard guard(a.device());
  const auto& found = find_step(op, steps, step, a);
  if (!found.fp32_out && out.scalar_type() != a.scalar_type()) {
    std::string others;
    for (const auto* each = steps.begin; each != steps.end; ++each) {
      if (each->fp32_out) others += (others.empty() ? "" : ", ") + std::string(each->name);
    }
    TORCH_CHECK_TYPE(false, "out is ", dtype_name(out.scalar_type()), ", must be ",
                     dtype_name(a.scalar_type()), ": ", op, " ", step, " writes no other, take ", others);
  }
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, {.a = static_cast<const T*>(a.const_data_ptr()),
                        .b = static_cast<const T*>(b.const_data_ptr()),
                        .out = static_cast<T*>(out.mutable_data_ptr()),
                        .M = a.size(0),
                        .N = b.size(1),
                        .K = a.size(1),
                        .stride_am = a.stride(0),
                        .stride_ak = a.stride(1),
                        .stride_bk = b.stride(0),
                        .stride_bn = b.stride(1),
                        .dtype = dtype_of(a),
                        .out_dtype = dtype_of(out),
                        .memory = &memory,
                        .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(out);
}

void matmul_fp32(const std::string& step, const Tensor& a, const Tensor& b, const Tensor& out) {
  matmul("matmul_fp32", matmul_fp32_steps, {at::kFloat}, step, a, b, out);
}

void matmul_tf32x3(const std::string& step, const Tensor& a, const Tensor& b, const Tensor& out) {
  matmul("matmul_tf32x3", matmul_tf32x3_steps, {at::kFloat}, step, a, b, out);
}

void matmul_bf16(const std::string& step, const Tensor& a, const Tensor& b, const Tensor& out) {
  matmul("matmul_bf16", matmul_bf16_steps, {at::kBFloat16, at::kHalf}, step, a, b, out);
}

// Always with a bias, and without keeping what the activation is applied to: the operator in matmul/torch.cpp
// does either.
void linear(const std::string& step, const Tensor& x, const Tensor& weight, const Tensor& bias,
            const Tensor& out, const std::string& activation) {
  const auto require = [&](const char* name, const Tensor& tensor, int64_t rank) {
    require_dtype(name, tensor, {at::kBFloat16, at::kHalf});
    require_same_dtype(name, tensor, "x", x);
    require_rank(name, tensor, rank);
    require_device(name, tensor, "x", x);
  };
  require("x", x, 2);
  require("weight", weight, 2);
  require("bias", bias, 1);
  require("out", out, 2);
  require_shape("weight", weight, {weight.size(0), x.size(1)}, "its columns are x's");
  require_shape("bias", bias, {weight.size(0)}, "one element for each row of weight");
  require_shape("out", out, {x.size(0), weight.size(0)}, "x's rows by weight's rows");
  require_contiguous("bias", bias);
  require_contiguous("out", out);
  require_apart(out, "x", x);
  require_apart(out, "weight", weight);
  require_apart(out, "bias", bias);
  const Activation chosen = activation_of(activation);

  const c10::cuda::CUDAGuard guard(x.device());
  const auto& found = find_step("linear", linear_steps, step, x);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, {.x = x.const_data_ptr(),
                        .weight = weight.const_data_ptr(),
                        .bias = bias.const_data_ptr(),
                        .out = out.mutable_data_ptr(),
                        .pre = nullptr,
                        .M = x.size(0),
                        .N = weight.size(0),
                        .K = x.size(1),
                        .stride_xm = x.stride(0),
                        .stride_xk = x.stride(1),
                        .stride_wn = weight.stride(0),
                        .stride_wk = weight.stride(1),
                        .dtype = dtype_of(x),
                        .activation = chosen,
                        .memory = &memory,
                        .stream = lender.stream()});
  mark_written(out);
}

// What operations along a matrix's rows take: any distance between rows that are contiguous.
void require_rows(const char* name, const Tensor& tensor) {
  require_dtype(name, tensor, {at::kFloat, at::kBFloat16, at::kHalf});
  require_rank(name, tensor, 2);
  TORCH_CHECK_VALUE(tensor.size(1) <= 1 || tensor.stride(1) == 1, name, " has strides ",
                    tuple(tensor.strides()), ", must have contiguous rows: call ", name, ".contiguous()");
}

void softmax(const std::string& step, const Tensor& x, const Tensor& out, bool log) {
  require_rows("x", x);
  require_cuda("x", x);
  require_dtype("out", out, {at::kFloat, at::kBFloat16, at::kHalf});
  require_same_dtype("out", out, "x", x);
  require_device("out", out, "x", x);
  require_shape("out", out, x.sizes(), "one element for each of x");
  require_contiguous("out", out);
  require_apart(out, "x", x);

  const c10::cuda::CUDAGuard guard(x.device());
  const auto& found = find_step("softmax", softmax_steps, step, x);
  found.launch({.x = x.const_data_ptr(),
                .out = out.mutable_data_ptr(),
                .M = x.size(0),
                .N = x.size(1),
                .stride_xm = x.stride(0),
                .dtype = dtype_of(x),
                .log = log,
                .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(out);
}

void softmax_backward(const std::string& step, const Tensor& dout, const Tensor& y, const Tensor& out,
                      bool log) {
  require_rows("dout", dout);
  require_cuda("dout", dout);
  require_rows("y", y);
  require_dtype("out", out, {at::kFloat, at::kBFloat16, at::kHalf});
  for (const auto& [name, tensor] : {std::pair{"y", &y}, std::pair{"out", &out}}) {
    require_same_dtype(name, *tensor, "dout", dout);
    require_device(name, *tensor, "dout", dout);
    require_shape(name, *tensor, dout.sizes(), "one element for each of dout");
  }
  require_contiguous("out", out);
  require_apart(out, "dout", dout);
  require_apart(out, "y", y);

  const c10::cuda::CUDAGuard guard(dout.device());
  const auto& found = find_step("softmax_backward", softmax_backward_steps, step, dout);
  found.launch({.dout = dout.const_data_ptr(),
                .y = y.const_data_ptr(),
                .out = out.mutable_data_ptr(),
                .M = dout.size(0),
                .N = dout.size(1),
                .stride_dm = dout.stride(0),
                .stride_ym = y.stride(0),
                .dtype = dtype_of(dout),
                .log = log,
                .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(out);
}

// -----------------------------------------------------------------------------------------------------------
// The norms: the counterpart of kernel_twins/ops/norm/shared.py
// -----------------------------------------------------------------------------------------------------------

using OptionalTensor = std::optional<Tensor>;
using Out = std::variant<Tensor, std::vector<Tensor>>;  // in this order, or rows would be taken for tensors

void require_matrix(const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  require_rows(name, tensor);
  require_same_dtype(name, tensor, like_name, like);
  require_device(name, tensor, like_name, like);
  require_shape(name, tensor, like.sizes(), (std::string("one element for each of ") + like_name).c_str());
}

void require_vector(const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  require_dtype(name, tensor, {at::kFloat, at::kBFloat16, at::kHalf});
  require_same_dtype(name, tensor, like_name, like);
  require_device(name, tensor, like_name, like);
  require_shape(name, tensor, {like.size(1)},
                (std::string("one element for each column of ") + like_name).c_str());
  require_contiguous(name, tensor);
}

void require_statistic(const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  require_dtype(name, tensor, {at::kFloat});
  require_device(name, tensor, like_name, like);
  require_shape(name, tensor, {like.size(0)},
                (std::string("one number for each row of ") + like_name).c_str());
  require_contiguous(name, tensor);
}

// The tensors of `out`, which are those of these names, in their order.
std::vector<Tensor> require_out(const Out& out, const std::vector<std::string_view>& names,
                                const char* like_name, const Tensor& like) {
  const auto* one = std::get_if<Tensor>(&out);
  const auto tensors = one ? std::vector<Tensor>{*one} : std::get<std::vector<Tensor>>(out);
  std::string all;
  for (const std::string_view name : names) all += (all.empty() ? "" : ", ") + std::string(name);
  TORCH_CHECK_TYPE(!one || names.size() == 1, "out is a Tensor, must be a tuple of ", text(names.size()),
                   " tensors: ", all);
  TORCH_CHECK_TYPE(one || names.size() > 1, "out is a tuple, must be one tensor: ", all);
  TORCH_CHECK_VALUE(tensors.size() == names.size(), "out has ", text(tensors.size()), " tensors, must have ",
                    text(names.size()), ": ", all);
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string label = one ? "out" : "out[" + text(i) + "]";
    if (names[i] == "mean" || names[i] == "rstd") {
      require_statistic(label.c_str(), tensors[i], like_name, like);
    } else if (names[i] == "dweight" || names[i] == "dbias") {
      require_vector(label.c_str(), tensors[i], like_name, like);
    } else {
      require_matrix(label.c_str(), tensors[i], like_name, like);
      require_contiguous(label.c_str(), tensors[i]);
    }
  }
  return tensors;
}

// No output overlaps an input, or another output.
void require_all_apart(const std::vector<Tensor>& outs,
                       std::initializer_list<std::pair<const char*, const Tensor*>> inputs) {
  for (size_t i = 0; i < outs.size(); ++i) {
    for (const auto& [name, input] : inputs) {
      if (input) require_apart(outs[i], name, *input);
    }
    for (size_t before = 0; before < i; ++before) {
      require_apart(outs[i], ("out[" + text(before) + "]").c_str(), outs[before]);
    }
  }
}

const Tensor* pointer(const OptionalTensor& tensor) { return tensor ? &*tensor : nullptr; }

const void* data(const OptionalTensor& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

// bias and out's mean are layer_norm's alone, which is what `centered` says.
void norm(const char* op, const StepTable<NormArgs>& steps, bool centered, const std::string& step,
          const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
          const OptionalTensor& residual, const Out& out, double eps) {
  require_rows("x", x);
  require_cuda("x", x);
  if (weight) require_vector("weight", *weight, "x", x);
  if (bias) require_vector("bias", *bias, "x", x);
  if (residual) require_matrix("residual", *residual, "x", x);
  std::vector<std::string_view> names = {"y"};
  if (centered) names.push_back("mean");
  names.push_back("rstd");
  if (residual) names.push_back("added");
  const std::vector<Tensor> outs = require_out(out, names, "x", x);
  require_all_apart(
      outs,
      {{"x", &x}, {"weight", pointer(weight)}, {"bias", pointer(bias)}, {"residual", pointer(residual)}});

  const c10::cuda::CUDAGuard guard(x.device());
  const auto& found = find_step(op, steps, step, x);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, {.x = x.const_data_ptr(),
                        .residual = data(residual),
                        .weight = data(weight),
                        .bias = data(bias),
                        .out = outs[0].mutable_data_ptr(),
                        .added = residual ? outs.back().mutable_data_ptr() : nullptr,
                        .mean = centered ? outs[1].mutable_data_ptr<float>() : nullptr,
                        .rstd = outs[centered ? 2 : 1].mutable_data_ptr<float>(),
                        .M = x.size(0),
                        .N = x.size(1),
                        .stride_xm = x.stride(0),
                        .stride_rm = residual ? residual->stride(0) : 0,
                        .dtype = dtype_of(x),
                        .eps = static_cast<float>(eps),
                        .memory = &memory,
                        .stream = lender.stream()});
  for (const Tensor& each : outs) mark_written(each);
}

void layer_norm(const std::string& step, const Tensor& x, const OptionalTensor& weight,
                const OptionalTensor& bias, const OptionalTensor& residual, const Out& out, double eps) {
  norm("layer_norm", layer_norm_steps, true, step, x, weight, bias, residual, out, eps);
}

void rms_norm(const std::string& step, const Tensor& x, const OptionalTensor& weight,
              const OptionalTensor& residual, const Out& out, double eps) {
  norm("rms_norm", rms_norm_steps, false, step, x, weight, std::nullopt, residual, out, eps);
}

// mean, and dbias where there is a weight, are layer_norm's alone.
void norm_backward(const char* op, const StepTable<NormBackwardArgs>& steps, const std::string& step,
                   const Tensor& dout, const Tensor& x, const OptionalTensor& mean, const Tensor& rstd,
                   const OptionalTensor& weight, const OptionalTensor& dadded, const Out& out) {
  require_rows("dout", dout);
  require_cuda("dout", dout);
  require_matrix("x", x, "dout", dout);
  if (mean) require_statistic("mean", *mean, "dout", dout);
  require_statistic("rstd", rstd, "dout", dout);
  if (weight) require_vector("weight", *weight, "dout", dout);
  if (dadded) require_matrix("dadded", *dadded, "dout", dout);
  std::vector<std::string_view> names = {"dx"};
  if (weight) names.push_back("dweight");
  if (weight && mean) names.push_back("dbias");
  const std::vector<Tensor> outs = require_out(out, names, "dout", dout);
  require_all_apart(outs, {{"dout", &dout},
                           {"x", &x},
                           {"mean", pointer(mean)},
                           {"rstd", &rstd},
                           {"weight", pointer(weight)},
                           {"dadded", pointer(dadded)}});

  const c10::cuda::CUDAGuard guard(dout.device());
  const auto& found = find_step(op, steps, step, dout);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, {.dout = dout.const_data_ptr(),
                        .x = x.const_data_ptr(),
                        .weight = data(weight),
                        .dadded = data(dadded),
                        .mean = mean ? mean->const_data_ptr<float>() : nullptr,
                        .rstd = rstd.const_data_ptr<float>(),
                        .dx = outs[0].mutable_data_ptr(),
                        .dweight = weight ? outs[1].mutable_data_ptr() : nullptr,
                        .dbias = weight && mean ? outs[2].mutable_data_ptr() : nullptr,
                        .M = dout.size(0),
                        .N = dout.size(1),
                        .stride_dm = dout.stride(0),
                        .stride_xm = x.stride(0),
                        .stride_am = dadded ? dadded->stride(0) : 0,
                        .dtype = dtype_of(dout),
                        .memory = &memory,
                        .stream = lender.stream()});
  for (const Tensor& each : outs) mark_written(each);
}

void layer_norm_backward(const std::string& step, const Tensor& dout, const Tensor& x, const Tensor& mean,
                         const Tensor& rstd, const OptionalTensor& weight, const OptionalTensor& dadded,
                         const Out& out) {
  norm_backward("layer_norm_backward", layer_norm_backward_steps, step, dout, x, mean, rstd, weight, dadded,
                out);
}

void rms_norm_backward(const std::string& step, const Tensor& dout, const Tensor& x, const Tensor& rstd,
                       const OptionalTensor& weight, const OptionalTensor& dadded, const Out& out) {
  norm_backward("rms_norm_backward", rms_norm_backward_steps, step, dout, x, std::nullopt, rstd, weight,
                dadded, out);
}

// -----------------------------------------------------------------------------------------------------------
// Cross entropy: the counterpart of kernel_twins/ops/loss/shared.py
// -----------------------------------------------------------------------------------------------------------

void require_classes(const Tensor& logits, const Tensor& target, double label_smoothing) {
  require_rows("logits", logits);
  require_cuda("logits", logits);
  require_dtype("target", target, {at::kLong});
  require_device("target", target, "logits", logits);
  require_shape("target", target, {logits.size(0)}, "one class for each row of logits");
  require_contiguous("target", target);
  TORCH_CHECK_VALUE(0 <= label_smoothing && label_smoothing <= 1, "label_smoothing is ",
                    std::to_string(label_smoothing), ", must be from 0 to 1");
}

void cross_entropy(const std::string& step, const Tensor& logits, const Tensor& target, const Out& out,
                   int64_t ignore_index, double label_smoothing) {
  require_classes(logits, target, label_smoothing);
  const auto* one = std::get_if<Tensor>(&out);
  const auto outs = one ? std::vector<Tensor>{*one} : std::get<std::vector<Tensor>>(out);
  TORCH_CHECK_VALUE(one || outs.size() == 2, "out has ", text(outs.size()),
                    " tensors, must have 2: losses, lse");
  for (size_t i = 0; i < outs.size(); ++i) {
    require_statistic(one ? "out" : ("out[" + text(i) + "]").c_str(), outs[i], "logits", logits);
  }
  require_all_apart(outs, {{"logits", &logits}, {"target", &target}});

  const c10::cuda::CUDAGuard guard(logits.device());
  const auto& found = find_step("cross_entropy", cross_entropy_steps, step, logits);
  found.launch({.logits = logits.const_data_ptr(),
                .target = target.const_data_ptr<int64_t>(),
                .losses = outs[0].mutable_data_ptr<float>(),
                .lse = one ? nullptr : outs[1].mutable_data_ptr<float>(),
                .M = logits.size(0),
                .N = logits.size(1),
                .stride_lm = logits.stride(0),
                .ignore_index = ignore_index,
                .dtype = dtype_of(logits),
                .smoothing = static_cast<float>(label_smoothing),
                .stream = c10::cuda::getCurrentCUDAStream()});
  for (const Tensor& each : outs) mark_written(each);
}

void cross_entropy_backward(const std::string& step, const Tensor& logits, const Tensor& target,
                            const Tensor& lse, const Tensor& dout, const Tensor& out, int64_t ignore_index,
                            double label_smoothing) {
  require_classes(logits, target, label_smoothing);
  require_statistic("lse", lse, "logits", logits);
  require_dtype("dout", dout, {at::kFloat});
  require_device("dout", dout, "logits", logits);
  require_shape("dout", dout, {logits.size(0)}, "one number for each row of logits");
  require_matrix("out", out, "logits", logits);
  require_contiguous("out", out);
  require_all_apart({out}, {{"logits", &logits}, {"target", &target}, {"lse", &lse}, {"dout", &dout}});

  const c10::cuda::CUDAGuard guard(logits.device());
  const auto& found = find_step("cross_entropy_backward", cross_entropy_backward_steps, step, logits);
  found.launch({.logits = logits.const_data_ptr(),
                .target = target.const_data_ptr<int64_t>(),
                .lse = lse.const_data_ptr<float>(),
                .dout = dout.const_data_ptr<float>(),
                .out = out.mutable_data_ptr(),
                .M = logits.size(0),
                .N = logits.size(1),
                .stride_lm = logits.stride(0),
                .stride_dm = dout.stride(0),
                .stride_om = logits.size(1),
                .ignore_index = ignore_index,
                .dtype = dtype_of(logits),
                .smoothing = static_cast<float>(label_smoothing),
                .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(out);
}

// -----------------------------------------------------------------------------------------------------------
// Dropout: the counterpart of kernel_twins/ops/dropout/shared.py
// -----------------------------------------------------------------------------------------------------------

Dropout dropout_with(double p, uint64_t seed, uint64_t offset) {
  require_probability(p);
  TORCH_CHECK_VALUE(offset % 4 == 0, "offset is ", std::to_string(offset),
                    ", must be a multiple of 4: it counts words, of which a call makes four");
  Dropout dropout = dropout_of(p);
  dropout.seed = seed;
  dropout.offset = offset;
  return dropout;
}

void dropout_add(const std::string& step, const Tensor& x, const OptionalTensor& residual,
                 const OptionalTensor& bias, const Tensor& out, double p, std::string_view activation,
                 uint64_t seed, uint64_t offset) {
  require_rows("x", x);
  require_cuda("x", x);
  if (residual) require_matrix("residual", *residual, "x", x);
  if (bias) require_vector("bias", *bias, "x", x);
  const Dropout dropout = dropout_with(p, seed, offset);
  require_matrix("out", out, "x", x);
  require_contiguous("out", out);
  require_all_apart({out}, {{"x", &x}, {"residual", pointer(residual)}, {"bias", pointer(bias)}});

  const c10::cuda::CUDAGuard guard(x.device());
  const auto& found = find_step("dropout_add", dropout_add_steps, step, x);
  found.launch({.x = x.const_data_ptr(),
                .residual = data(residual),
                .bias = data(bias),
                .out = out.mutable_data_ptr(),
                .M = x.size(0),
                .N = x.size(1),
                .stride_xm = x.stride(0),
                .stride_rm = residual ? residual->stride(0) : 0,
                .dtype = dtype_of(x),
                .activation = activation_of(activation),
                .dropout = dropout,
                .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(out);
}

void dropout_add_backward(const std::string& step, const Tensor& dout, const OptionalTensor& x,
                          const OptionalTensor& bias, const Out& out, double p, std::string_view activation,
                          uint64_t seed, uint64_t offset) {
  require_rows("dout", dout);
  require_cuda("dout", dout);
  if (x) require_matrix("x", *x, "dout", dout);
  if (bias) require_vector("bias", *bias, "dout", dout);
  const Dropout dropout = dropout_with(p, seed, offset);
  const Activation chosen = activation_of(activation);
  require_slopes(chosen, activation, x.has_value(), bias.has_value());
  std::vector<std::string_view> names = {"dx"};
  if (std::holds_alternative<std::vector<Tensor>>(out)) names.push_back("dbias");
  const std::vector<Tensor> outs = require_out(out, names, "dout", dout);
  require_all_apart(outs, {{"dout", &dout}, {"x", pointer(x)}, {"bias", pointer(bias)}});

  const c10::cuda::CUDAGuard guard(dout.device());
  const auto& found = find_step("dropout_add_backward", dropout_add_backward_steps, step, dout);
  Lender lender;
  const Memory memory = lender.memory();
  lender.launch(found, {.dout = dout.const_data_ptr(),
                        .x = data(x),
                        .bias = data(bias),
                        .dx = outs[0].mutable_data_ptr(),
                        .dbias = outs.size() > 1 ? outs[1].mutable_data_ptr() : nullptr,
                        .M = dout.size(0),
                        .N = dout.size(1),
                        .stride_dm = dout.stride(0),
                        .stride_xm = x ? x->stride(0) : 0,
                        .dtype = dtype_of(dout),
                        .activation = chosen,
                        .dropout = dropout,
                        .memory = &memory,
                        .stream = lender.stream()});
  for (const Tensor& each : outs) mark_written(each);
}

void probe(const std::string& name, const Tensor& buffer, int64_t iterations) {
  require_dtype("buffer", buffer, {at::kByte});
  require_cuda("buffer", buffer);
  require_contiguous("buffer", buffer);
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(buffer.const_data_ptr()) % 16 == 0,
                    "buffer starts at an address that is not a multiple of 16: do not slice it");
  TORCH_CHECK_VALUE(iterations >= 0, "iterations is ", text(iterations), ", must be at least 0");

  const c10::cuda::CUDAGuard guard(buffer.device());
  const auto& found = find_step("probe", probe_steps, name, buffer);
  found.launch({.buffer = buffer.mutable_data_ptr(),
                .bytes = buffer.numel(),
                .iterations = iterations,
                .stream = c10::cuda::getCurrentCUDAStream()});
  mark_written(buffer);
}

bool step_runs(const std::string& arch, std::pair<int, int> capability, const std::string& architectures) {
  return runs_step(arch, capability, parse_architectures(architectures));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using py::arg;
  using torch::wrap_pybind_function;  // turns torch's errors into TypeError, ValueError and OutOfMemoryError
  m.doc() =
      "The CUDA steps. Each function launches the named step on the current stream and writes into out.";
  m.attr("architectures") = KERNEL_TWINS_ARCHS;
  m.def("runs", wrap_pybind_function(step_runs), arg("arch"), arg("capability"), arg("architectures"),
        "Whether a GPU of that compute capability runs a step of that arch, such as >=9.0, compiled for "
        "architectures, a list such as 8.0;9.0a.");
  m.def("vector_add", wrap_pybind_function(vector_add), arg("step"), arg("a"), arg("b"), arg("out"),
        "out = a + b. Contiguous, of one shape; all fp32, bf16 or fp16. out may be a or b.");
  m.def("reduction", wrap_pybind_function(reduction), arg("step"), arg("x"), arg("out"),
        "out = the sum of x. x: contiguous, any shape, fp32, bf16 or fp16; out: fp32, no dimensions.");
  m.def(
      "reduction_nd", wrap_pybind_function(reduction_nd), arg("step"), arg("x"), arg("out"),
      arg("dims") = std::vector<int64_t>{-1}, arg("kind") = "sum",
      "out = the sum of x over the axes dims, the mean, the max or the argmax, its place among the reduced "
      "ones. x: 1 to 5 axes, any strides, fp32, bf16 or fp16; out: the other axes, contiguous, of x's dtype, "
      "for argmax int64.");
  m.def("matmul_fp32", wrap_pybind_function(matmul_fp32), arg("step"), arg("a"), arg("b"), arg("out"),
        "out = a @ b in fp32. a: [M, K], b: [K, N], any strides; out: [M, N], contiguous.");
  m.def("matmul_tf32x3", wrap_pybind_function(matmul_tf32x3), arg("step"), arg("a"), arg("b"), arg("out"),
        "out = a @ b, fp32 from three TF32 products. a: [M, K], b: [K, N], any strides; out: [M, N], "
        "contiguous.");
  m.def("matmul_bf16", wrap_pybind_function(matmul_bf16), arg("step"), arg("a"), arg("b"), arg("out"),
        "out = a @ b, summed in fp32. a: [M, K], b: [K, N], any strides; out: [M, N], contiguous. a and b "
        "are bf16 or fp16 alike, out is so or fp32.");
  m.def("linear", wrap_pybind_function(linear), arg("step"), arg("x"), arg("weight"), arg("bias"), arg("out"),
        arg("activation") = "none",
        "out = activation(x @ weight.T + bias), none, relu, gelu, gelu_tanh or silu. x: [M, K], weight: "
        "[N, K], any strides; bias: [N], out: [M, N], contiguous; all bf16 or fp16.");
  m.def("softmax", wrap_pybind_function(softmax), arg("step"), arg("x"), arg("out"), arg("log") = false,
        "out = softmax(x) over the rows, or its logarithm. x: [M, N], rows contiguous, fp32, bf16 or fp16; "
        "out: [M, N], contiguous, of x's dtype.");
  m.def("softmax_backward", wrap_pybind_function(softmax_backward), arg("step"), arg("dout"), arg("y"),
        arg("out"), arg("log") = false,
        "out = the gradient of x from dout and softmax's result y, or log_softmax's. dout, y: [M, N], rows "
        "contiguous, fp32, bf16 or fp16 alike; out: [M, N], contiguous.");
  m.def(
      "layer_norm", wrap_pybind_function(layer_norm), arg("step"), arg("x"), arg("weight") = py::none(),
      arg("bias") = py::none(), arg("residual") = py::none(), py::kw_only(), arg("out"), arg("eps") = 1e-5,
      "out = (x - mean) * rstd * weight + bias over the rows, mean, rstd, and with a residual x + residual, "
      "of which the rest then is. x, residual: [M, N], rows contiguous, fp32, bf16 or fp16; weight, bias: "
      "[N]; out: [M, N] and [M], contiguous, of x's dtype and fp32.");
  m.def("layer_norm_backward", wrap_pybind_function(layer_norm_backward), arg("step"), arg("dout"), arg("x"),
        arg("mean"), arg("rstd"), arg("weight") = py::none(), arg("dadded") = py::none(), py::kw_only(),
        arg("out"),
        "out = the gradients of x, weight and bias through layer_norm, without a weight that of x alone. "
        "dout, x, dadded: [M, N], rows contiguous, fp32, bf16 or fp16 alike; mean, rstd: [M], fp32; weight: "
        "[N]; out: [M, N] and [N], contiguous. dadded, the sum's own gradient, is added to x's.");
  m.def(
      "rms_norm", wrap_pybind_function(rms_norm), arg("step"), arg("x"), arg("weight") = py::none(),
      arg("residual") = py::none(), py::kw_only(), arg("out"), arg("eps") = 1e-6,
      "out = x * rstd * weight over the rows, rstd, and with a residual x + residual, of which the rest "
      "then is. x, residual: [M, N], rows contiguous, fp32, bf16 or fp16; weight: [N]; out: [M, N] and [M], "
      "contiguous, of x's dtype and fp32.");
  m.def(
      "rms_norm_backward", wrap_pybind_function(rms_norm_backward), arg("step"), arg("dout"), arg("x"),
      arg("rstd"), arg("weight") = py::none(), arg("dadded") = py::none(), py::kw_only(), arg("out"),
      "out = the gradients of x and weight through rms_norm, without a weight that of x alone. dout, x, "
      "dadded: [M, N], rows contiguous, fp32, bf16 or fp16 alike; rstd: [M], fp32; weight: [N]; out: [M, N] "
      "and [N], contiguous. dadded, the sum's own gradient, is added to x's.");
  m.def("cross_entropy", wrap_pybind_function(cross_entropy), arg("step"), arg("logits"), arg("target"),
        arg("out"), arg("ignore_index") = -100, arg("label_smoothing") = 0.0,
        "out = the cross entropy of the rows of logits and their target classes, or a tuple of that and of "
        "the logarithms of the sums of exponentials. logits: [M, N], rows contiguous, fp32, bf16 or fp16; "
        "target: [M], int64; out: [M], contiguous, fp32. 0 where the target is ignore_index.");
  m.def("cross_entropy_backward", wrap_pybind_function(cross_entropy_backward), arg("step"), arg("logits"),
        arg("target"), arg("lse"), arg("dout"), arg("out"), arg("ignore_index") = -100,
        arg("label_smoothing") = 0.0,
        "out = the gradient of logits through cross_entropy, from lse, which that returned, and dout. "
        "logits: [M, N], rows contiguous, fp32, bf16 or fp16; target: [M], int64; lse, dout: [M], fp32; "
        "out: [M, N], contiguous.");
  m.def("dropout_add", wrap_pybind_function(dropout_add), arg("step"), arg("x"), arg("residual") = py::none(),
        arg("bias") = py::none(), py::kw_only(), arg("out"), arg("p") = 0.5, arg("activation") = "none",
        arg("seed") = 0, arg("offset") = 0,
        "out = dropout(activation(x + bias)) + residual. x, residual: [M, N], rows contiguous, fp32, bf16 or "
        "fp16; bias: [N]; out: [M, N], contiguous. Element i is kept where word i % 4 of Philox4x32-10 is at "
        "least p * 2**32: its key is seed, its counter offset / 4 and i / 4. offset is a multiple of 4.");
  m.def(
      "dropout_add_backward", wrap_pybind_function(dropout_add_backward), arg("step"), arg("dout"),
      arg("x") = py::none(), arg("bias") = py::none(), py::kw_only(), arg("out"), arg("p") = 0.5,
      arg("activation") = "none", arg("seed") = 0, arg("offset") = 0,
      "out = the gradient of x through dropout_add, or those of x and bias. dout, x: [M, N], rows "
      "contiguous, fp32, bf16 or fp16 alike; bias: [N]; out: [M, N] and [N], contiguous. x, and a bias, only "
      "with an activation.");
  m.def("probe", wrap_pybind_function(probe), arg("name"), arg("buffer"), arg("iterations"),
        "Launches a probe of hardware-survey/probes.h. buffer: contiguous uint8, overwritten.");
}
