// dropout_add_backward v04_rows_abreast: all blocks work on neighbouring rows, of any length.
//
// Change:   blocks take rows in turn, where v02 and v03 give each a run of neighbouring rows. The rows of a
//           block have the same skew, so a thread's packs have the same columns in each, whatever the rows'
//           length; and as packs of the matrix they take no Philox call twice. A thread works on two rows
//           while the loads of the next two are under way; with an activation, on one, and it loads the next
//           one after it has drawn that one's words. All threads run as many iterations, so that a warp holds
//           the keys of ten rounds once, in uniform registers. If dbias is not wanted, dx is computed by
//           packs that are counted through the matrix, two a thread, as in the forward pass (function_dx.cu).
// Why:      in rows of 5,003 elements v02's accesses have one element, and 8 elements take three Philox
//           calls. At other lengths v03 has more loads a thread under way than v02 and is no faster. The
//           blocks of both, 528 or 396, read and write runs of rows that lie apart, in as many pages of
//           memory; neighbouring rows need few pages at a time. That the pages are the limit is a guess,
//           which nothing has measured.
// Counter:  dram_share rises, less than expected; time falls, more without dbias and with GELU, most in rows
//           of 5,003 elements.
// Requires: rows that are contiguous, at any distance; any length.
//           - addresses that are multiples of 16 bytes, and rows that lie end to end or a multiple of 16
//             bytes farther apart: 16 bytes an access, but for the ends of rows that are not whole packs
//           - others: one element an access
// Gap:      Triton makes accesses of 16 bytes only where it knows that all rows begin at multiples of 16
//           bytes; its threads have the same columns in every row.
#include "args.h"
#include "columns.cuh"
#include "dx.h"
#include "gradient_pack.cuh"
#include "lib/row_chunks.cuh"

namespace {

constexpr int THREADS = 256;  // of a block, at most
constexpr int AHEAD = 2;      // rows under way, half with slopes
constexpr int BLOCKS_PER_SM = 3;

// Writes an element of dx, and returns it before it is rounded.
template <typename T, Activation ACTIVATION>
__device__ float take_element(const DropoutAddBackwardArgs& args, const Mask& mask, int64_t row,
                              int64_t col) {
  float z = 0.0f;
  if (ACTIVATION != Activation::none) {
    z = to_float(static_cast<const T*>(args.x)[row * args.stride_xm + col]);
    if (args.bias) z += to_float(static_cast<const T*>(args.bias)[col]);
  }
  const float dout = to_float(static_cast<const T*>(args.dout)[row * args.stride_dm + col]);
  const float passed = gradient<ACTIVATION>(dout, z, args.dropout.scale);
  const float dx = mask.keeps(row * args.N + col) ? passed : 0.0f;
  static_cast<T*>(args.dx)[row * args.N + col] = from_float<T>(dx);
  return dx;
}

// ROWS rows of a thread are under way. partials: [chunks, N]. Which access: see Requires.
template <typename T, Activation ACTIVATION, Access ACCESS, int ROWS>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    dropout_add_backward_v04_rows_abreast_kernel(const DropoutAddBackwardArgs args, const RowLayout layout,
                                                 float* partials) {
  constexpr int SIZE = Pack<T>::SIZE;
  constexpr bool WIDE = ACCESS == Access::PACKS, SLOPES = ACTIVATION != Activation::none;
  constexpr Operand BIAS = SLOPES ? Operand::GIVEN : Operand::MISSING;
  __shared__ float totals[THREADS * SIZE];
  const int lane = threadIdx.x % layout.lanes, group = threadIdx.x / layout.lanes;
  const int strip = blockIdx.x % layout.strips, chunk = blockIdx.x / layout.strips;
  const int64_t row = layout.first_row(chunk, group),
                step = static_cast<int64_t>(layout.chunks) * layout.groups;
  const int skew = static_cast<int>(chunk % layout.period * args.N % SIZE);
  const int64_t strip_col = static_cast<int64_t>(strip) * layout.lanes * SIZE - skew,
                col = strip_col + lane * SIZE;
  // The elements of this pack that belong to the row: `count` of them, from `begin` on.
  const int begin = static_cast<int>(max(-col, int64_t{0}));
  const int count = static_cast<int>(min(args.N - col, int64_t{SIZE})) - begin;
  const int most = layout.turns;
  int turns = count <= 0 ? 0 : row + (most - 1) * step < args.M ? most : most - 1;
  // A pack that would reach beyond the matrix comes after all others, element by element.
  const int64_t last = row + (turns - 1) * step;
  const int64_t distance = SLOPES ? min(args.stride_dm, args.stride_xm) : args.stride_dm;
  const bool ends = WIDE && turns > 0 && col + SIZE > args.N + (args.M - 1 - last) * distance;
  if (ends) --turns;

  const T* dout_at = static_cast<const T*>(args.dout) + row * args.stride_dm + col;
  const T* x_at = static_cast<const T*>(args.x) + row * args.stride_xm + col;
  Pack<T> douts[ROWS] = {}, xs[ROWS] = {};
  const auto load = [&](int i, bool is_row) {
    if (WIDE) {
      load_if(is_row, dout_at, douts[i].words);
      if (SLOPES) load_if(is_row, x_at, xs[i].words);
    } else if (is_row) {
      douts[i] = load_ragged(dout_at + begin, -begin, count, 0.0f);
      if (SLOPES) xs[i] = load_ragged(x_at + begin, -begin, count, 0.0f);
    }
    dout_at += step * args.stride_dm;
    x_at += step * args.stride_xm;
  };
#pragma unroll
  for (int i = 0; i < ROWS; ++i) load(i, i < turns);

  const Mask mask(args.dropout);
  Pack<T> bias = {};
  if (SLOPES && args.bias && turns > 0) {
    bias = load_ragged(static_cast<const T*>(args.bias) + col + begin, -begin, count, 0.0f);
  }
  float sums[SIZE] = {};
  T* dx_at = static_cast<T*>(args.dx) + row * args.N + col;
  int64_t at = row * args.N + col;
  // All threads run as many turns, whether they have a row in the last one or not: if they left the loop at
  // different times, the keys of Philox's rounds would take registers of every thread.
  for (int turn = 0; turn < most; turn += ROWS) {
    Pack<T> taken_douts[ROWS], taken_xs[ROWS];
    const auto take = [&](int i) {
      taken_douts[i] = douts[i], taken_xs[i] = xs[i];
      load(i, turn + ROWS + i < turns);
    };
    // All rows at once: the compiler waits for their loads as for one, so a wait for one row is a wait for
    // the next, too.
    if (!SLOPES) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) take(i);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const bool is_row = turn + i < turns;
      bool kept[SIZE];
      if (WIDE) {
        keeps_from(mask, kept, at, 0);
      } else {
        keeps_anywhere(mask, kept, at);
      }
      // Waits for a row as late as possible, and issues the loads of the next one after that.
      if (SLOPES) {
        take_after(kept, layout.zero, douts[i]);
        take_after(kept, layout.zero, xs[i]);
        take(i);
      }
      const Gradients<T, ACTIVATION, BIAS> dx(kept, taken_douts[i], taken_xs[i], bias, args.dropout.scale);
      if (is_row) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) sums[j] += dx.of[j];
      }
      store_if(WIDE && is_row && count == SIZE, reinterpret_cast<uint4*>(dx_at), dx.rounded());
      if (is_row && !(WIDE && count == SIZE)) {
        int behind = begin;
        asm volatile("" : "+r"(behind));  // against CSE of eight stores' conditions from row to row
        store_pack(dx_at + behind, -behind, count, false, dx.rounded());
      }
      at += step * args.N;
      dx_at += step * args.N;
    }
  }

#pragma unroll
  for (int j = 0; j < SIZE; ++j) totals[threadIdx.x * SIZE + j] = sums[j];
  for (int j = begin; ends && j < begin + count; ++j) {
    totals[threadIdx.x * SIZE + j] += take_element<T, ACTIVATION>(args, mask, last, col + j);
  }
  __syncthreads();  // for the sums of all groups
  add_groups(totals, layout, layout.lanes * SIZE, strip_col, args.N, partials + chunk * args.N);
}

template <typename T>
__global__ void __launch_bounds__(32 * CHUNK_WARPS)
    dropout_add_backward_v04_rows_abreast_sum_kernel(const float* partials, int chunks, int64_t N, T* dbias) {
  add_chunks(partials, chunks, N, dbias);
}

template <typename T, Activation ACTIVATION, int ROWS>
void launch(const DropoutAddBackwardArgs& args) {
  const bool wide = are_skewed_alike<T>(args);
  const RowLayout layout = row_layout<T, THREADS, BLOCKS_PER_SM>(args.M, args.N, wide);
  auto* partials = static_cast<float*>(args.memory->workspace(layout.chunks * args.N * sizeof(float)));
  const auto kernel = wide ? dropout_add_backward_v04_rows_abreast_kernel<T, ACTIVATION, Access::PACKS, ROWS>
                           : dropout_add_backward_v04_rows_abreast_kernel<T, ACTIVATION, Access::ELEMENTS, 1>;
  kernel<<<layout.strips * layout.chunks, layout.lanes * layout.groups, 0, args.stream>>>(args, layout,
                                                                                          partials);
  dropout_add_backward_v04_rows_abreast_sum_kernel<T><<<cdiv(args.N, 32), 32 * CHUNK_WARPS, 0, args.stream>>>(
      partials, layout.chunks, args.N, static_cast<T*>(args.dbias));
}

}  // namespace

void dropout_add_backward_v04_rows_abreast(const DropoutAddBackwardArgs& args) {
  if (args.N == 0) return;
  if (args.dbias == nullptr) return dropout_add_backward_dx(args);
  dispatch(args.dtype, args.activation, [&]<typename T, Activation ACTIVATION>() {
    launch<T, ACTIVATION, ACTIVATION == Activation::none ? AHEAD : AHEAD / 2>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
