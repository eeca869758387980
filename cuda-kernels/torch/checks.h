// Argument checks of the operators, with the messages of kernel_twins/ops/tensors.py. Arguments of steps are
// checked by that Python module itself, see steps.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <string>

namespace kernel_twins {

using at::Tensor;

// Numbers in messages are converted by this function: streaming a number through torch's macros crashes where
// the compiler links libstdc++ statically, as in some containers.
inline std::string text(int64_t value) { return std::to_string(value); }

inline std::string text(const c10::SymInt& value) {
  const auto known = value.maybe_as_int();
  return known ? text(*known) : "a symbol";
}

// Sizes or strides as Python prints a tuple: (), (5,), (2, 3).
template <typename Int>
std::string tuple(at::ArrayRef<Int> values) {
  std::string items;
  for (size_t i = 0; i < values.size(); ++i) items += (i ? ", " : "") + text(values[i]);
  return "(" + items + (values.size() == 1 ? ",)" : ")");
}

// As Python prints it, torch.float32, but without Python: operators run without its lock.
inline std::string dtype_name(at::ScalarType dtype) { return "torch." + c10::getDtypeNames(dtype).first; }

inline void require_dtype(const char* name, const Tensor& tensor,
                          std::initializer_list<at::ScalarType> accepted) {
  if (std::find(accepted.begin(), accepted.end(), tensor.scalar_type()) != accepted.end()) return;
  std::string names;
  for (at::ScalarType dtype : accepted) names += (names.empty() ? "" : " or ") + dtype_name(dtype);
  TORCH_CHECK_TYPE(false, name, " is ", dtype_name(tensor.scalar_type()), ", must be ", names, ": call ",
                   name, ".to(...)");
}

inline void require_same_dtype(const char* name, const Tensor& tensor, const char* other_name,
                               const Tensor& other) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), name, " is ",
                   dtype_name(tensor.scalar_type()), ", must be ", dtype_name(other.scalar_type()), " like ",
                   other_name, ": call ", name, ".to(", other_name, ".dtype)");
}

inline void require_same_device(const char* name, const Tensor& tensor, const char* other_name,
                                const Tensor& other) {
  TORCH_CHECK_VALUE(tensor.device() == other.device(), name, " is on ", tensor.device().str(),
                    ", must be on ", other.device().str(), " like ", other_name, ": call ", name, ".to(",
                    other_name, ".device)");
}

// Requires `tensor` to have the dtype and the device of `like`. The message offers backend='torch', because
// some of PyTorch's functions accept mixed dtypes.
inline void require_like(const char* name, const Tensor& tensor, const char* like_name, const Tensor& like) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), name, " is ", dtype_name(tensor.scalar_type()),
                   ", must be ", dtype_name(like.scalar_type()), " like ", like_name, ": call ", name, ".to(",
                   like_name, ".dtype), or pass backend='torch'");
  require_same_device(name, tensor, like_name, like);
}

}  // namespace kernel_twins
