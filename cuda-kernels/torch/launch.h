// Helpers of every launch from torch: dtypes, data pointers, and telling autograd about writes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

#include "lib/step.h"
#include "memory.h"

namespace kernel_twins {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline Dtype dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Dtype::fp32;
    case at::kBFloat16:
      return Dtype::bf16;
    case at::kHalf:
      return Dtype::fp16;
    default:
      TORCH_INTERNAL_ASSERT(false, "require_dtype lets no other through");
  }
}

inline Dtype dtype_of(const Tensor& tensor) { return dtype_of(tensor.scalar_type()); }

// Tells autograd that a kernel has written to `out`, so that it notices if it had saved the old values.
inline void mark_written(const Tensor& out) {
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
}

// Data pointer of an optional tensor; nullptr if it is absent.
inline const void* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}
inline const void* data_or_null(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

}  // namespace kernel_twins
