// Rows held by the whole GPU: a group of blocks, one on each SM, holds a row in shared memory, for rows that
// no cluster holds. Each row is read once. Terms: docs/glossary.md.
//
// The last warp of a block loads, all others work. A part of a row arrives in chunks, in a ring of slots that
// is filled again as soon as a chunk is written; so the next rows' parts arrive while a block waits for its
// group. For each row workers take the numbers of their part, publish them in global memory, wait until all
// blocks of the group did the same, merge them in the order of the parts, and write from shared memory.
//
// All blocks of a group must run at once, or they would wait forever: the launch is cooperative, which starts
// either all blocks or none.
#pragma once

#include "held.cuh"
#include "lib/ptx/hopper.cuh"

constexpr int GRID_WARPS = 15, GRID_WORKERS = 32 * GRID_WARPS;  // that work
constexpr int GRID_THREADS = GRID_WORKERS + 32;  // with the warp that loads: 128 registers each
constexpr int MOST_SLOTS = 15;            // of a ring: as many as the shared memory of an H100's SM holds
constexpr int MOST_AHEAD = 3;             // rows whose numbers a block publishes before it waits for a row's
constexpr int GRID_BARRIER = 1;           // the named barrier of the workers
constexpr int64_t GRID_ROW = 256 * 1024;  // bytes of a row from which its parts are worth the barrier
constexpr int OTHER_SHARED = 1536;        // bytes of a block beside its ring

// A chunk has this many packs of each of TENSORS matrices, and one word more, as packs may be shifted.
template <int TENSORS>
constexpr int CHUNK_PACKS = 2 * GRID_WORKERS / TENSORS;
template <int TENSORS>
constexpr int CHUNK_WORDS = CHUNK_PACKS<TENSORS> + 1;
template <int TENSORS>
constexpr int SLOT_BYTES = TENSORS * CHUNK_WORDS<TENSORS> * 16;

// What a group shares. `groups` groups of `blocks` blocks go through M rows of N elements; group g has rows
// g, g + groups, ... A part has `each` packs; a block's ring has `slots` slots.
struct GridShape {
  int64_t M = 0;
  int N = 0, groups = 0, blocks = 0, each = 0, slots = 0;
};

// A group's counts in zeroed memory, in a sector of 32 bytes of its own: arrivals at its rows' barriers, and
// blocks that have passed the last one. Its row number k, from 0 on, counts in arrived[k % ROWS_COUNTED],
// which grows by the group's blocks from row to row. That is unambiguous: a block arrives for row k +
// ROWS_COUNTED only after it has passed the barrier of row k, for which all have arrived.
constexpr int ROWS_COUNTED = MOST_AHEAD + 1;
struct alignas(32) GroupCounts {
  uint32_t arrived[ROWS_COUNTED], done;
};

// The inputs: rows that may start anywhere within 16 bytes, whatever the skew of the others.
template <typename T, int TENSORS>
struct GridInputs {
  const T* rows[TENSORS];
  int64_t strides[TENSORS];
};

// A block's part of a row: packs that are laid out from column `start` on, which lies before the row where
// the first pack does. Columns from `end` on are not of the part.
struct GridPart {
  int64_t row;
  int rank, start, end;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// PTX ISA, "red". Adds 1; what this thread wrote before, or saw others write, is visible to whoever acquires
// the sum.
__device__ inline void add_release(uint32_t* count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}

// PTX ISA, "ld". What was released by the additions that the value shows is visible to this thread.
__device__ inline uint32_t load_acquire(const uint32_t* count) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  return value;
}

// PTX ISA, "atom". Counts calls in global memory, and returns true in the last of `calls`; then the count
// starts again. What other callers read before is read before whatever follows the last call.
__device__ inline bool is_last(uint32_t* count, uint32_t calls) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(count), "r"(calls - 1)
               : "memory");
  return before == calls - 1;
}

// Loads numbers that another block wrote past L1.
template <typename Numbers>
__device__ Numbers load_from_l2(const Numbers* place) {
  constexpr int WORDS = sizeof(Numbers) / 4;
  uint32_t words[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) words[i] = __ldcg(reinterpret_cast<const uint32_t*>(place) + i);
  Numbers numbers;
  memcpy(&numbers, words, sizeof(Numbers));
  return numbers;
}

// Merges the numbers of 32 lanes as a tree, always the same one. Lane 0 gets the result.
template <typename Work, typename Numbers>
__device__ Numbers merge_lanes(Numbers mine) {
  constexpr int WORDS = sizeof(Numbers) / 4;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    uint32_t words[WORDS];
    memcpy(words, &mine, sizeof(Numbers));
#pragma unroll
    for (uint32_t& word : words) word = __shfl_down_sync(0xffffffff, word, distance);
    Numbers other;
    memcpy(&other, words, sizeof(Numbers));
    mine = Work::merge(mine, other);
  }
  return mine;
}

// A place in the ring; `turn` is the parity of how often the ring was gone through.
struct RingPlace {
  int slot = 0;
  uint32_t turn = 0;

  __device__ void next(int slots) {
    if (++slot < slots) return;
    slot = 0;
    turn ^= 1;
  }
};

// One block of the grid. Work has
//   Numbers                          what is merged; made without arguments it changes nothing
//   FILL                             what stands in packs outside of the row
//   skew_of_row(row)                 the elements between the first pack's start and the row's
//   add(numbers, part, packs, at)    adds a thread's packs, GRID_WORKERS packs apart, pack 0 at column `at`
//   merge(numbers, numbers)
//   begin_row(part, numbers)         before a row is written, with the merged numbers
//   write(part, packs, at, pack)     writes the same packs' results; pack 0 is number `pack` of the part
template <typename T, int TENSORS, typename Work>
struct GridBlock {
  static constexpr int SIZE = Pack<T>::SIZE, CHUNK = CHUNK_PACKS<TENSORS>, PACKS = CHUNK / GRID_WORKERS;
  using Numbers = typename Work::Numbers;

  const GridShape& shape;
  const GridInputs<T, TENSORS>& inputs;
  Work& work;
  char* slots;
  uint64_t *full, *empty;
  int group, rank, rows;

  __device__ GridPart part_of(int turn) const {
    const int64_t row = group + static_cast<int64_t>(turn) * shape.groups;
    const int start = rank * shape.each * SIZE - work.skew_of_row(row);
    return {row, rank, start, min(shape.N, start + shape.each * SIZE)};
  }
  __device__ static int packs_of(const GridPart& part) {
    return max(0, (part.end - part.start + SIZE - 1) / SIZE);
  }
  __device__ const T* row_of(int tensor, const GridPart& part) const {
    return inputs.rows[tensor] + part.row * inputs.strides[tensor];
  }
  __device__ uint4* words_of(int slot, int tensor) const {
    return reinterpret_cast<uint4*>(slots + slot * SLOT_BYTES<TENSORS>) + tensor * CHUNK_WORDS<TENSORS>;
  }

  // Loads all rows' parts, called by one thread. Of a chunk all aligned words that touch its packs are
  // copied, but for those that reach beyond the row, and so might reach beyond the tensor.
  __device__ void load() const {
    const uint64_t policy = l2_evict_first_policy();
    RingPlace place;
    for (int turn = 0; turn < rows; ++turn) {
      const GridPart part = part_of(turn);
      const int packs = packs_of(part);
      for (int first = 0; first < packs; first += CHUNK, place.next(shape.slots)) {
        mbarrier_wait_parity(&empty[place.slot], place.turn ^ 1);  // for all warps to be done with the slot
        const T* sources[TENSORS];
        int begins[TENSORS], bytes[TENSORS], all_bytes = 0;
#pragma unroll
        for (int t = 0; t < TENSORS; ++t) {
          const T* const row = row_of(t, part);
          const int shift = skew_of(row + part.start), column = part.start + first * SIZE - shift;
          const int words = min(CHUNK, packs - first) + (shift > 0 ? 1 : 0);
          const int begin = column < 0 ? (-column + SIZE - 1) / SIZE : 0;
          const int end = column < shape.N ? min(words, (shape.N - column) / SIZE) : 0;
          begins[t] = begin;
          bytes[t] = max(0, end - begin) * 16;
          sources[t] = row + (column + begin * SIZE);
          all_bytes += bytes[t];
        }
        mbarrier_arrive_expect_tx(&full[place.slot], all_bytes);
#pragma unroll
        for (int t = 0; t < TENSORS; ++t) {
          if (bytes[t] > 0)
            bulk_load(words_of(place.slot, t) + begins[t], sources[t], bytes[t], &full[place.slot], policy);
        }
      }
    }
  }

  // Packs of a chunk for this worker, `pack` and on. A pack whose words reach beyond the row was not copied:
  // its elements are loaded one by one.
  __device__ void take(Pack<T> (&packs)[TENSORS][PACKS], const GridPart& part, int slot, int pack) const {
#pragma unroll
    for (int t = 0; t < TENSORS; ++t) {
      const T* const row = row_of(t, part);
      const int shift = skew_of(row + part.start);
      const uint4* const words = words_of(slot, t) + threadIdx.x;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const int column = part.start + (pack + i * GRID_WORKERS) * SIZE, begin = column - shift;
        if (column < part.end && begin >= 0 && begin + SIZE * (shift > 0 ? 2 : 1) <= shape.N) {
          const uint4 low = words[i * GRID_WORKERS];
          packs[t][i] = shift == 0 ? Pack<T>{low} : put_together<T>(low, words[i * GRID_WORKERS + 1], shift);
        } else {
          packs[t][i] = load_ragged(row, column, part.end, Work::FILL);
        }
      }
    }
  }

  // The numbers of this worker's packs of a row.
  __device__ Numbers reduce(const GridPart& part, RingPlace& place) const {
    Numbers mine{};
    const int packs = packs_of(part);
    for (int first = 0; first < packs; first += CHUNK, place.next(shape.slots)) {
      mbarrier_wait_parity(&full[place.slot], place.turn);  // for the chunk to arrive
      Pack<T> held[TENSORS][PACKS];
      const int pack = first + static_cast<int>(threadIdx.x);
      take(held, part, place.slot, pack);
      work.add(mine, part, held, part.start + pack * SIZE);
    }
    return mine;
  }

  // Writes a row's part, and frees its slots.
  __device__ void write(const GridPart& part, RingPlace& place) const {
    const int packs = packs_of(part);
    for (int first = 0; first < packs; first += CHUNK, place.next(shape.slots)) {
      Pack<T> held[TENSORS][PACKS];
      const int pack = first + static_cast<int>(threadIdx.x);
      take(held, part, place.slot, pack);
      __syncwarp();  // for all lanes to have their packs
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&empty[place.slot]);
      work.write(part, held, part.start + pack * SIZE, pack);
    }
  }
};

#endif

// A kernel's body. numbers: [M, blocks of a group]; counts: [groups], zero before and after.
template <typename T, int TENSORS, typename Work>
__device__ void go_through_grid_rows(const GridShape& shape, const GridInputs<T, TENSORS>& inputs,
                                     GroupCounts* counts, typename Work::Numbers* numbers, Work& work) {
#if __CUDA_ARCH__ >= 900
  using Block = GridBlock<T, TENSORS, Work>;
  using Numbers = typename Work::Numbers;
  extern __shared__ __align__(128) char slots[];
  __shared__ uint64_t full[MOST_SLOTS], empty[MOST_SLOTS];
  __shared__ Numbers of_warps[2][GRID_WARPS], wholes[2];  // in turns, see below
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int group = blockIdx.x / shape.blocks, rank = blockIdx.x % shape.blocks;
  const int rows = static_cast<int>((shape.M - group + shape.groups - 1) / shape.groups);
  const Block block{shape, inputs, work, slots, full, empty, group, rank, rows};

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < shape.slots; ++slot) {
      mbarrier_init(&full[slot], 1);
      mbarrier_init(&empty[slot], GRID_WARPS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // for the mbarriers to be initialised
  if (warp_id == GRID_WARPS) {
    if (lane_id == 0) block.load();
    return;
  }

  GroupCounts& count = counts[group];
  const int chunks = max(1, (shape.each + Block::CHUNK - 1) / Block::CHUNK);
  // Rows may be reduced ahead only as far as the ring holds them: none of their slots is freed before the row
  // is written.
  const int ahead = min(shape.slots / chunks - 1, MOST_AHEAD);
  RingPlace to_reduce, to_write;
  int reduced = 0;
  for (int turn = 0; turn < rows; ++turn) {
    for (; reduced < min(rows, turn + 1 + ahead); ++reduced) {
      const GridPart part = block.part_of(reduced);
      const Numbers of_warp = merge_lanes<Work>(block.reduce(part, to_reduce));
      // Warp 0 has read the numbers of two rows before: it has come to the barrier below for the last row.
      if (lane_id == 0) of_warps[reduced % 2][warp_id] = of_warp;
      named_barrier_sync(GRID_BARRIER, GRID_WORKERS);  // for every warp's numbers
      if (warp_id > 0) continue;
      const Numbers of_part =
          merge_lanes<Work>(lane_id < GRID_WARPS ? of_warps[reduced % 2][lane_id] : Numbers{});
      if (lane_id == 0) {
        numbers[part.row * shape.blocks + rank] = of_part;
        add_release(&count.arrived[reduced % ROWS_COUNTED]);  // after the store, by the same thread
      }
    }

    const GridPart part = block.part_of(turn);
    if (warp_id == 0) {
      // Lane 0 acquires what the blocks released; the warp's barrier passes it on to the other lanes.
      if (lane_id == 0) {
        const uint32_t expected = (turn / ROWS_COUNTED + 1) * static_cast<uint32_t>(shape.blocks);
        while (load_acquire(&count.arrived[turn % ROWS_COUNTED]) < expected) {
        }
      }
      __syncwarp();
      Numbers whole{};
      for (int other = lane_id; other < shape.blocks; other += 32) {
        whole = Work::merge(whole, load_from_l2(&numbers[part.row * shape.blocks + other]));
      }
      whole = merge_lanes<Work>(whole);
      if (lane_id == 0) wholes[turn % 2] = whole;
      // The last block of the group that needs no count any more leaves them zero for the next launch.
      if (lane_id == 0 && turn == rows - 1 && is_last(&count.done, shape.blocks)) {
        for (uint32_t& arrived : count.arrived) arrived = 0;
      }
    }
    // For the merged numbers. All have read those of two rows before: they have come to the last row's
    // barrier.
    named_barrier_sync(GRID_BARRIER, GRID_WORKERS);
    work.begin_row(part, wholes[turn % 2]);
    block.write(part, to_write);
  }
#endif
}

// Bytes of the current device's L2.
inline int64_t l2_bytes() {
  int device = 0, bytes = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device));
  return bytes;
}

// The shape with the least expected time. No blocks if the GPU does not hold a row, or if L2 holds all of
// TENSORS matrices: then two launches read device memory once, too, and wait at no barrier. Time counts in
// packs of each SM: those of the parts that it goes through, and for each row a wait at the barrier, which
// rows that are reduced ahead hide in part.
template <typename T, int TENSORS>
GridShape grid_shape(int64_t M, int64_t N) {
  constexpr int64_t WAIT = 2048;  // packs that an SM loads meanwhile
  const int64_t sms = multiprocessor_count(), room = most_shared_memory() - OTHER_SHARED;
  const int64_t slots = std::min<int64_t>(room / SLOT_BYTES<TENSORS>, int64_t{MOST_SLOTS});
  const int64_t lines = cdiv(most_packs<T, LINE_BYTES>(N), LINE_PACKS);
  GridShape best;
  if (M > INT32_MAX || N > INT32_MAX / 2) return best;
  if (M * N * TENSORS * static_cast<int64_t>(sizeof(T)) <= l2_bytes()) return best;
  int64_t least = INT64_MAX;
  const int64_t most_groups = std::min<int64_t>({M, sms, ZEROED_BYTES / sizeof(GroupCounts)});
  for (int64_t groups = 1; groups <= most_groups; ++groups) {
    const int64_t blocks = sms / groups, each = cdiv(lines, blocks) * LINE_PACKS;
    const int64_t chunks = cdiv(each, CHUNK_PACKS<TENSORS>);
    if (slots < chunks) break;
    const int64_t in_flight = std::min<int64_t>(slots / chunks, MOST_AHEAD + 1);
    const int64_t time = cdiv(M, groups) * (each * TENSORS + WAIT / in_flight);
    if (time >= least) continue;
    least = time;
    best = {M,
            static_cast<int>(N),
            static_cast<int>(groups),
            static_cast<int>(blocks),
            static_cast<int>(each),
            static_cast<int>(slots)};
  }
  return best;
}

// Launches kernel(arguments...) for that shape as a cooperative launch.
template <int TENSORS, typename Kernel, typename... Arguments>
void launch_grid(const GridShape& shape, cudaStream_t stream, Kernel* kernel, Arguments... arguments) {
  allow_shared_memory(kernel, most_shared_memory() - OTHER_SHARED);
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(shape.groups * shape.blocks);
  config.blockDim = GRID_THREADS;
  config.dynamicSmemBytes = static_cast<size_t>(shape.slots) * SLOT_BYTES<TENSORS>;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}
