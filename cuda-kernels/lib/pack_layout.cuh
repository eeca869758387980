// How packs that are counted through all rows lie in the matrices of a kernel. Terms: docs/glossary.md.
#pragma once

#include "common.cuh"

// Two matrices and a bias that a kernel reads, and the matrix that it writes.
struct MatrixOperands {
  const void* first;   // [M, N], rows contiguous
  const void* second;  // [M, N], rows contiguous; or null
  const void* bias;    // [N]; or null
  void* out;           // [M, N], contiguous
  int64_t M, N;
  int64_t stride_first, stride_second;  // in elements
};

// How packs lie in memory. If rows lie end to end, a pack has the same offset in first and second as in out.
struct PackLayout {
  bool wide;        // packs are aligned, but for the matrix's last elements; a bias has one pack at least
  bool end_to_end;  // the rows of first and second, one behind the other
  bool wide_bias;   // packs of the bias are aligned, and none spans two rows
  int64_t step_rows, step_cols;  // from one of a thread's packs to the next one
  uint32_t zero;                 // 0, unknown to the compiler: see lib/waits.cuh
};

template <typename T, int THREADS>
PackLayout layout_of(const MatrixOperands& args) {
  constexpr int64_t SIZE = Pack<T>::SIZE, STEP = THREADS * SIZE;
  const bool end_to_end = args.M == 1 || (args.stride_first == args.N &&
                                          (args.second == nullptr || args.stride_second == args.N));
  const bool whole = args.N % SIZE == 0 && args.stride_first % SIZE == 0 &&
                     (args.second == nullptr || args.stride_second % SIZE == 0);
  const bool aligned = aligned_to_16_bytes(args.first, args.second, args.out);
  return {(end_to_end || whole) && aligned && (args.bias == nullptr || args.N >= SIZE),
          end_to_end,
          args.N % SIZE == 0 && aligned_to_16_bytes(args.bias),
          STEP / args.N,
          STEP % args.N,
          0};
}
