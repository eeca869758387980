// Packs of rows that start at different places within 16 bytes: loads and stores that stay wide all the same.
// Terms: docs/glossary.md.
#pragma once

#include "held.cuh"
#include "load_if.cuh"

// A part of a row: its first element and its end are `from` and `end`, counted from column `start` of the
// row. Packs are counted from there, too: it lies at a multiple of 16 bytes of the matrix for which packs are
// laid out, and so up to a pack before the row.
template <typename T>
struct RowPart {
  static constexpr int SIZE = Pack<T>::SIZE;
  int64_t start;
  int from, end;

  // Part number `part` of a row of N elements, in parts of `each` packs. `skew` is the row's in the matrix
  // for which packs are laid out.
  __device__ RowPart(int64_t N, int skew, int64_t part, int each)
      : start(part * each * SIZE - skew),
        from(static_cast<int>(max(-start, int64_t{0}))),
        end(static_cast<int>(max(min(N - start, int64_t{each} * SIZE), int64_t{0}))) {}

  __device__ bool has(int at) const { return at >= from && at < end; }
  // How many of the part's elements are in the pack that starts at `first`.
  __device__ int count(int first) const { return max(min(end, first + SIZE) - max(from, first), 0); }
};

// The row of a matrix of which a block has a part. `low` to `high` may be read: all of the matrix, as far as
// it is near the part.
template <typename T>
struct ReadRow {
  const T* row;  // its element `start`; null if there is no matrix
  int low, high;

  __device__ ReadRow(const void* matrix, int64_t index, int64_t M, int64_t N, int64_t stride,
                     const RowPart<T>& part)
      : row(matrix ? static_cast<const T*>(matrix) + index * stride + part.start : nullptr),
        low(static_cast<int>(max(-part.start - index * stride, int64_t{-part.SIZE}))),
        high(static_cast<int>(
            min(N - part.start + (M - 1 - index) * stride, int64_t{part.end} + 2 * part.SIZE))) {}
  // Weights or biases of N elements.
  __device__ ReadRow(const void* factors, int64_t N, const RowPart<T>& part)
      : ReadRow(factors, 0, 1, N, 0, part) {}
};

// PACKS packs of a row, `step` elements apart; elements outside of the part are 0. The row may
// start anywhere within 16 bytes: a pack that spans two aligned words of 16 bytes is shifted together from
// them. A word that would reach beyond the matrix is not read: the pack's elements are loaded one by one.
template <typename T, int PACKS>
class ShiftedPacks {
 public:
  // Issues the wide loads; operator[] waits for them.
  __device__ ShiftedPacks(const ReadRow<T>& from, const RowPart<T>& part, int first, int step)
      : from_(from), part_(part), first_(first), step_(step), shift_(skew_of(from.row)) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const T* const place = from.row + (first_of(i) - shift_);
      low_[i] = high_[i] = make_uint4(0, 0, 0, 0);
      load_if<Reading::USUAL>(is_wide(i), place, low_[i]);
      load_if<Reading::USUAL>(is_wide(i) && shift_ > 0, place + Pack<T>::SIZE, high_[i]);
    }
  }

  __device__ Pack<T> operator[](int i) const {
    Pack<T> pack = {low_[i]};
    if (shift_ > 0) pack = put_together<T>(low_[i], high_[i], shift_);
    if (part_.count(first_of(i)) == Pack<T>::SIZE && is_wide(i)) return pack;
    if (from_.row == nullptr || part_.count(first_of(i)) == 0) return {};
    const bool wide = is_wide(i);
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) {
      const bool inside = part_.has(first_of(i) + j);
      if (!inside) set(pack, j, from_float<T>(0.0f));
      if (inside && !wide) set(pack, j, from_.row[first_of(i) + j]);
    }
    return pack;
  }

 private:
  __device__ int first_of(int i) const { return first_ + i * step_; }
  // Whether the pack has an element of the part, and its aligned words lie within the matrix.
  __device__ bool is_wide(int i) const {
    const int begin = first_of(i) - shift_, words = shift_ > 0 ? 2 : 1;
    return from_.row && part_.count(first_of(i)) > 0 && begin >= from_.low &&
           begin + words * Pack<T>::SIZE <= from_.high;
  }

  const ReadRow<T> from_;
  const RowPart<T>& part_;
  int first_, step_, shift_;
  uint4 low_[PACKS], high_[PACKS];
};

// Whether stored bytes are read again soon. If not, L2 replaces them first, and keeps what will be read.
enum class Reuse { SOON, NONE };

// Stores a pack of the part to the matrix for which packs are laid out. `row` is its element `start`.
template <Reuse REUSE, typename T>
__device__ void store_part(T* row, const RowPart<T>& part, int first, Pack<T> pack) {
  if (part.count(first) == Pack<T>::SIZE) {
    auto* const place = reinterpret_cast<uint4*>(row + first);
    REUSE == Reuse::SOON ? __stwb(place, pack.words) : __stcs(place, pack.words);
  } else {
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) {
      if (part.has(first + j)) row[first + j] = pack[j];
    }
  }
}
