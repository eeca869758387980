// The gradients of a norm's weight and bias without that of x: dweight = sum(dout * xhat) and dbias =
// sum(dout) over the rows, with xhat = (x - mean) * rstd, or x * rstd for rms_norm. It reads x, and writes
// nothing of x's size.
#include "lib/column_sums.cuh"
#include "norm/norm_kind.h"
#include "parameters.h"

namespace {

// Of which parameters the gradients are wanted.
enum class Wanted { WEIGHT, BIAS, BOTH };

template <typename T, int VECTOR, Norm NORM, Wanted WANTED>
class Terms {
 public:
  static constexpr int COUNT = VECTOR, SUMS = WANTED == Wanted::BOTH ? 2 : 1, UNROLL = 4;

  __device__ Terms(const NormBackwardArgs& args, int64_t col) : args_(args), col_(col) {}

  __device__ void add(float (&sums)[SUMS][COUNT], int64_t row) const {
    const auto gradients = Neighbours<T, COUNT>::load(args_.dout, row * args_.stride_dm + col_);
    if constexpr (WANTED != Wanted::BIAS) {
      const auto values = Neighbours<T, COUNT>::load(args_.x, row * args_.stride_xm + col_);
      const float mean = NORM == Norm::LAYER ? args_.mean[row] : 0.0f, rstd = args_.rstd[row];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        sums[0][i] += to_float(gradients.of[i]) * ((to_float(values.of[i]) - mean) * rstd);
      }
    }
    if constexpr (WANTED != Wanted::WEIGHT) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) sums[SUMS - 1][i] += to_float(gradients.of[i]);
    }
  }

 private:
  const NormBackwardArgs& args_;
  const int64_t col_;
};

template <typename T, int VECTOR>
void launch(const NormBackwardArgs& args) {
  T* dweight = static_cast<T*>(args.dweight);
  T* dbias = static_cast<T*>(args.dbias);
  if (dweight && dbias) {
    sum_columns<Terms<T, VECTOR, Norm::LAYER, Wanted::BOTH>>(args, dweight, dbias);
  } else if (dbias) {
    sum_columns<Terms<T, VECTOR, Norm::LAYER, Wanted::BIAS>>(args, dbias);
  } else if (args.mean) {
    sum_columns<Terms<T, VECTOR, Norm::LAYER, Wanted::WEIGHT>>(args, dweight);
  } else {
    sum_columns<Terms<T, VECTOR, Norm::RMS, Wanted::WEIGHT>>(args, dweight);
  }
}

}  // namespace

void norm_backward_parameters(const NormBackwardArgs& args) {
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int SIZE = Pack<T>::SIZE;
    const bool packs = args.N % SIZE == 0 && args.stride_dm % SIZE == 0 && args.stride_xm % SIZE == 0 &&
                       aligned_to_16_bytes(args.dout, args.x);
    packs ? launch<T, SIZE>(args) : launch<T, 1>(args);
  });
}
