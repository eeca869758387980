// The gradient of dropout_add's bias without that of x: the column sums of dx, which is not stored.
#include "bias.h"
#include "dropout/mask.cuh"
#include "gradient.cuh"
#include "lib/column_sums.cuh"
#include "lib/packs.cuh"

namespace {

template <typename T, Activation ACTIVATION, int VECTOR>
class Terms {
 public:
  // One row at a time: with several, the words of all would be drawn at once.
  static constexpr int COUNT = VECTOR, SUMS = 1, UNROLL = 1;

  __device__ Terms(const DropoutAddBackwardArgs& args, int64_t col)
      : args_(args), col_(col), mask_(args.dropout) {
    if (SLOPES && args.bias) bias_ = Row::load(args.bias, col);
  }

  __device__ void add(float (&sums)[SUMS][COUNT], int64_t row) {
    const Row gradients = Row::load(args_.dout, row * args_.stride_dm + col_);
    Row values = {};
    if (SLOPES) values = Row::load(args_.x, row * args_.stride_xm + col_);
    bool kept[COUNT];
    if constexpr (COUNT > 1) {
      mask_.keeps(kept, row * args_.N + col_);
    } else {
      kept[0] = mask_.keeps(row * args_.N + col_);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const float z = to_float(values.of[i]) + to_float(bias_.of[i]);
      const float passed = gradient<ACTIVATION>(to_float(gradients.of[i]), z, args_.dropout.scale);
      sums[0][i] += kept[i] ? passed : 0.0f;
    }
    mask_.forget_keys();
  }

 private:
  static constexpr bool SLOPES = ACTIVATION != Activation::none;
  using Row = Neighbours<T, COUNT>;

  const DropoutAddBackwardArgs& args_;
  const int64_t col_;
  Mask mask_;
  Row bias_ = {};
};

}  // namespace

void dropout_add_backward_bias(const DropoutAddBackwardArgs& args) {
  dispatch(args.dtype, args.activation, [&]<typename T, Activation ACTIVATION>() {
    constexpr int SIZE = Pack<T>::SIZE;
    const bool packs = args.N % SIZE == 0 && args.stride_dm % SIZE == 0 && args.stride_xm % SIZE == 0 &&
                       aligned_to_16_bytes(args.dout, args.x, args.bias);
    T* dbias = static_cast<T*>(args.dbias);
    packs ? sum_columns<Terms<T, ACTIVATION, SIZE>>(args, dbias)
          : sum_columns<Terms<T, ACTIVATION, 1>>(args, dbias);
  });
}
