// Rows: a view of a tensor of any shape and strides as the matrix that row kernels take.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "operator.h"

namespace kernel_twins {

// A tensor as rows along `dims` neighbouring dimensions from `dim` on; the other dimensions, in order, number
// the rows. The tensor is copied only if the elements of a row are not contiguous, or if its rows are not
// equally spaced. A tensor that repeats one element everywhere becomes a single row with stride 0.
class Rows {
 public:
  Rows(const at::Tensor& tensor, int64_t dim, int64_t dims = 1) {
    const int64_t end = std::min(dim + dims, tensor.dim());  // a 0-d tensor is a row of one element
    if (const auto found = distance(tensor, dim, end)) {
      elements_ = tensor;
      stride_ = *found;
    } else if (is_one_number(tensor)) {
      elements_ = tensor.as_strided({length(tensor, dim, end)}, {0}).contiguous();
      stride_ = 0;
    } else {
      elements_ = (end < tensor.dim() ? tensor.movedim(dim, -1) : tensor).contiguous();
      stride_ = length(tensor, dim, end);
    }
  }

  const void* data() const { return elements_.const_data_ptr(); }

  // Distance between rows, in elements; 0 if every row is the same memory.
  int64_t stride() const { return stride_; }

 private:
  static int64_t length(const at::Tensor& tensor, int64_t begin, int64_t end) {
    int64_t N = 1;
    for (int64_t i = begin; i < end; ++i) N *= tensor.size(i);
    return N;
  }

  // The distance between rows, or nothing if rows are not equally spaced or their elements not contiguous.
  static std::optional<int64_t> distance(const at::Tensor& tensor, int64_t begin, int64_t end) {
    const at::IntArrayRef sizes = tensor.sizes();
    const at::IntArrayRef strides = tensor.strides();
    int64_t N = 1;  // elements in the dimensions seen so far, as is `rows` below
    for (int64_t i = end - 1; i >= begin; --i) {
      if (sizes[i] > 1 && strides[i] != N) return std::nullopt;
      N *= sizes[i];
    }
    std::optional<int64_t> stride;
    int64_t rows = 1;
    for (int64_t i = tensor.dim() - 1; i >= 0; --i) {
      if ((begin <= i && i < end) || sizes[i] == 1) continue;
      if (stride && strides[i] != *stride * rows) return std::nullopt;
      if (!stride) stride = strides[i];
      rows *= sizes[i];
    }
    return stride.value_or(N);
  }

  // True if all elements are the same memory, as in the gradient of a sum.
  static bool is_one_number(const at::Tensor& tensor) {
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      if (tensor.size(i) > 1 && tensor.stride(i) != 0) return false;
    }
    return true;
  }

  at::Tensor elements_;
  int64_t stride_;
};

inline Tensor contiguous_or_none(const OptionalTensor& tensor) {
  return tensor ? tensor->contiguous() : Tensor();
}

template <typename Int>
std::vector<Int> moved_last(at::ArrayRef<Int> sizes, int64_t dim) {
  std::vector<Int> moved(sizes.begin(), sizes.end());
  std::rotate(moved.begin() + dim, moved.begin() + dim + 1, moved.end());
  return moved;
}

inline bool is_last(int64_t dim, const Tensor& tensor) { return dim + 1 >= tensor.dim(); }

// An empty result of the tensor's shape whose rows are contiguous; the tensor is contiguous if dim is the
// last.
inline Tensor empty_rows(const Tensor& like, int64_t dim) {
  if (is_last(dim, like)) return empty(like.sizes(), like.scalar_type(), like.device());
  return empty(moved_last(like.sizes(), dim), like.scalar_type(), like.device()).movedim(-1, dim);
}

inline Tensor empty_rows_meta(const Tensor& like, int64_t dim) {
  if (is_last(dim, like)) return at::empty_symint(like.sym_sizes(), like.options());
  return at::empty_symint(moved_last(like.sym_sizes(), dim), like.options()).movedim(-1, dim);
}

}  // namespace kernel_twins
