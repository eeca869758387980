// The forward pass where rows of x or of the residual start anywhere within 16 bytes: packs are aligned in
// out, and those of x and of the residual are shifted together from aligned words.
#include "dropout/dropout_shifted.cuh"
#include "forward.cuh"
#include "shifted.h"

namespace {

constexpr int THREADS = 128;
// Packs of a thread. A residual or a bias, and the end of a row within a pack, take the registers of a second
// one.
template <Operand RESIDUAL, Operand BIAS, Ends ENDS>
constexpr int PACKS = ENDS == Ends::WITHIN && (RESIDUAL == Operand::GIVEN || BIAS == Operand::GIVEN) ? 1 : 2;
// Blocks of an SM, as many as registers leave room for.
template <Operand RESIDUAL, int COUNT>
constexpr int BLOCKS = RESIDUAL == Operand::MISSING ? 8
                       : COUNT == 1                 ? 7
                                                    : 6;

template <typename T, Activation ACTIVATION, Operand RESIDUAL, Operand BIAS, Ends ENDS, int COUNT>
__global__ void __launch_bounds__(THREADS, BLOCKS<RESIDUAL, COUNT>)
    dropout_add_shifted_kernel(const PackArgs args, const PackLayout layout) {
  const Forward<T, ACTIVATION, RESIDUAL, BIAS> forward{args.dropout.scale};
  take_shifted_packs<T, RESIDUAL, BIAS, ENDS, COUNT, THREADS>(args, layout, forward);
}

template <typename T, Activation ACTIVATION>
void launch(const DropoutAddArgs& args) {
  const PackArgs packs = packs_of(args);
  const PackLayout layout = layout_of<T, THREADS>(packs);
  with_operands(args, [&]<Operand RESIDUAL, Operand BIAS>() {
    const auto with_ends = [&]<Ends ENDS>() {
      constexpr int COUNT = PACKS<RESIDUAL, BIAS, ENDS>;
      const int64_t blocks = cdiv(args.M * args.N, COUNT * THREADS * Pack<T>::SIZE);
      dropout_add_shifted_kernel<T, ACTIVATION, RESIDUAL, BIAS, ENDS, COUNT>
          <<<blocks, THREADS, 0, args.stream>>>(packs, layout);
    };
    args.N % Pack<T>::SIZE == 0 ? with_ends.template operator()<Ends::BETWEEN>()
                                : with_ends.template operator()<Ends::WITHIN>();
  });
}

}  // namespace

void dropout_add_shifted(const DropoutAddArgs& args) {
  dispatch(args.dtype, args.activation,
           [&]<typename T, Activation ACTIVATION>() { launch<T, ACTIVATION>(args); });
}
