// How operators along rows read a tensor of any number of dimensions and any strides.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "operator.h"

namespace kernel_twins {

// A tensor's elements as a step reads them: a row lies along `dims` neighbouring dimensions from `dim` on,
// and the rows come in the order of the other dimensions. Copied are only those that have no neighbours in
// their row, or whose rows lie at no one distance; and of one number everywhere, one row.
class Rows {
 public:
  Rows(const at::Tensor& tensor, int64_t dim, int64_t dims = 1) {
    const int64_t end = std::min(dim + dims, tensor.dim());  // one of 0 dimensions is a row of one element
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

  // How far the rows lie apart, in elements; 0 where one row is seen many times.
  int64_t stride() const { return stride_; }

 private:
  static int64_t length(const at::Tensor& tensor, int64_t begin, int64_t end) {
    int64_t N = 1;
    for (int64_t i = begin; i < end; ++i) N *= tensor.size(i);
    return N;
  }

  // Nothing where that is no one number, or where a row's elements are no neighbours.
  static std::optional<int64_t> distance(const at::Tensor& tensor, int64_t begin, int64_t end) {
    const at::IntArrayRef sizes = tensor.sizes();
    const at::IntArrayRef strides = tensor.strides();
    int64_t N = 1;  // of the dimensions that were looked at, here and below
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

  // Whether all elements are the same one, as of the gradient of a sum.
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

// A result like the tensor: its rows lie one after the other, so it is contiguous where dim is the last.
inline Tensor empty_rows(const Tensor& like, int64_t dim) {
  if (is_last(dim, like)) return empty(like.sizes(), like.scalar_type(), like.device());
  return empty(moved_last(like.sizes(), dim), like.scalar_type(), like.device()).movedim(-1, dim);
}

inline Tensor empty_rows_meta(const Tensor& like, int64_t dim) {
  if (is_last(dim, like)) return at::empty_symint(like.sym_sizes(), like.options());
  return at::empty_symint(moved_last(like.sym_sizes(), dim), like.options()).movedim(-1, dim);
}

}  // namespace kernel_twins
