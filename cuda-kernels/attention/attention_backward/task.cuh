// A tile of keys of a batch, or of sequences of different lengths, as v10's blocks draw it.
#pragma once

#include "lib/head_queue.cuh"
#include "lib/packed_sequences.h"
#include "tiles.cuh"

// What v10 serves beyond a BackwardProblem.
struct AnyBackwardProblem : BackwardProblem {
  HeadStrides dq_stride, dk_stride, dv_stride;
  float cap;  // with a softcap, turns scores into its tanh's arguments; 0 without one
  bool from_end;
  PackedSequences queries, keys;  // without sequences their starts are null
};

// A tile: its head of keys and batch, its first key within its sequence, and that sequence. `head` is -1
// behind the last tile.
struct KeyTask {
  int head, batch, key;
  int first_q, first_k;  // tokens before the sequence
  int padded_q;          // rows of lse, delta and dq's sums before it
  int Sq, Sk;
  int first, last;  // query i sees the keys from i + first to i + last
  float factor;     // the problem's
};

// Of sequences, one has whole tiles of block_m queries, and of block_n keys.
__device__ inline KeyTask key_task_of(const AnyBackwardProblem& problem, const Queue& queue, int block_m,
                                      unsigned number) {
  KeyTask task = {-1, 0, 0, 0, 0, 0, problem.Sq, problem.Sk, problem.first, problem.last, problem.factor};
  if (problem.keys.starts == nullptr) {
    const Work work = work_of(queue, number);
    if (work.head < 0) return task;
    task.head = work.head % problem.kv_heads;
    task.batch = work.head / problem.kv_heads;
    task.key = work.row;
  } else {
    if (number >= static_cast<unsigned>(queue.tiles)) return task;
    const int in_order =
        static_cast<int>(number) / problem.kv_heads;  // all heads of a slot behind each other
    const int slot = queue.last_first ? queue.blocks - 1 - in_order : in_order;
    const int n = problem.keys.sequence_of(slot, queue.block);
    task.head = static_cast<int>(number) % problem.kv_heads;
    task.key = (slot - problem.keys.first_slot(n, queue.block)) * queue.block;
    task.first_q = problem.queries.starts[n];
    task.first_k = problem.keys.starts[n];
    task.padded_q = problem.queries.first_slot(n, block_m) * block_m;
    task.Sq = problem.queries.starts[n + 1] - task.first_q;
    task.Sk = problem.keys.starts[n + 1] - task.first_k;
  }
  const int shift = problem.from_end ? task.Sk - task.Sq : 0;
  task.first = min(max(task.first + shift, -task.Sq), task.Sk);
  task.last = min(max(task.last + shift, -task.Sq), task.Sk);
  return task;
}

// The tiles of queries that a task visits. Where heavy tiles of keys, which are the first to be drawn, reach
// the last queries, these come first.
struct Visits {
  Tiles tiles;
  bool ascending;
  int count;  // over all heads of the group

  __device__ int head(int i) const { return i / tiles.count; }  // among the group's
  __device__ int row(int i, int block_m) const {
    const int tile = i % tiles.count;
    return (tiles.first + (ascending ? tile : tiles.count - 1 - tile)) * block_m;
  }
};

__device__ inline Visits visits_of(const AnyBackwardProblem& problem, const Queue& queue, const KeyTask& task,
                                   int block_m) {
  const Tiles tiles = queries_of(task, task.key, queue.block, block_m);
  return {tiles, queue.last_first, tiles.count * problem.group};
}

// How many tiles of keys of which some are seen by the block_m queries from `row` on are drawn before the
// task's.
__device__ inline int tasks_before(const Queue& queue, const KeyTask& task, int row, int block_m) {
  const int block_n = queue.block;
  if (!queue.last_first) return task.key / block_n - max(row + task.first, 0) / block_n;
  const int last_row = min(row + block_m, task.Sq) - 1;
  return min(last_row + task.last, task.Sk - 1) / block_n - task.key / block_n;
}

// How many queries see a key.
inline int64_t queries_of_key(const BackwardProblem& problem, int64_t key) {
  const int64_t low = std::max<int64_t>(key - problem.last, 0);
  return std::max<int64_t>(std::min<int64_t>(key - problem.first, problem.Sq - 1) - low + 1, 0);
}
