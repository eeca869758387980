// layer_norm v10_one_row: a cluster holds one row, if rows start on lines.
//
// Change:   a cluster holds one row of 12 to 80 KiB that starts on a line, where v08's holds two. A warp has
//           2 or 2.5 KiB of it, a block up to four warps.
// Why:      v08 takes two rows to halve the traffic of weights and biases from L2. Through L1 little of that
//           traffic is left, while the second row takes registers with which more warps would run, and an SM
//           has more bytes under way than memory serves best. Clusters with one row also start and end in
//           smaller pieces. Trials ran before the predictions.
// Counter:  time falls a little at rows of 12288 and 16384.
// Requires: as v09.
//           - from 12 KiB on, starting on lines, without a residual, in at most eight blocks of which a
//             twelfth at most is idle: this step's kernel
//           - others: v09_rows_per_warp
// Source:   see v08
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "args.h"
#include "norm/norm_held.cuh"

void layer_norm_v09_rows_per_warp(const LayerNormArgs& args);

namespace {

constexpr int64_t ROW = 12 * 1024;  // bytes from which one row a cluster is faster than two
constexpr int MOST_BLOCKS = 8;      // of a cluster; for longer rows two rows are faster
constexpr int THREADS = 128;        // of a block; only clusters of more than 8 blocks have larger ones
constexpr int64_t IDLE_SHARE = 12;  // one in so many of the packs that threads have room for may be idle
// Blocks that an SM runs at once: a thread has 64 registers, or 72 for five packs, and an SM has 64 or 70 KiB
// of rows under way. v08's threads have 80 for two rows of five packs, and its SMs 120 KiB under way.
template <int PACKS>
constexpr int BLOCKS = PACKS == 4 ? 8 : 7;

template <typename T, int PACKS>
__global__ void __launch_bounds__(THREADS, BLOCKS<PACKS>)
    layer_norm_v10_one_row_kernel(const LayerNormArgs args, int blocks, int period) {
  normalise_held<T, 1, PACKS, true, true, false>(args, blocks, period);
}

template <typename T, int PACKS>
bool launch(const LayerNormArgs& args) {
  return launch_held<T, 1, PACKS, true, true>(args, layer_norm_v10_one_row_kernel<T, PACKS>);
}
template <typename T>
bool launch(const LayerNormArgs& args) {
  constexpr int64_t NONE = INT64_MAX;
  const int64_t packs = args.N / Pack<T>::SIZE;
  if (args.residual || !are_lined<T>(args) || packs * 16 < ROW) return false;
  // Packs that a cluster has room for, or NONE if too much of it would be idle: an idle lane loads nothing,
  // and no second row makes up for it. With an eighth idle, one row takes longer than a half of two at once.
  const auto room_of = [&](int each) {
    const HeldShape shape(packs, each);
    const int64_t room = int64_t{shape.blocks} * shape.threads * each;
    const bool fits = room >= packs && shape.blocks <= MOST_BLOCKS;
    return fits && IDLE_SHARE * (room - packs) <= room ? room : NONE;
  };
  const int64_t four = room_of(4), five = room_of(5);
  if (four == NONE && five == NONE) return false;
  return four <= five ? launch<T, 4>(args) : launch<T, 5>(args);
}

}  // namespace

void layer_norm_v10_one_row(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) layer_norm_v09_rows_per_warp(args);
  });
}
