// Assignment of a kernel's chunks to threads near their data, on machines with several nodes that have processors.
#pragma once

#include <sched.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace memascend {

// A node whose processors the calling thread may use.
struct CpuNode {
  int number;
  cpu_set_t cpus;
};

// The threads of one node and the chunks near it: order[begin .. end) of the plan.
struct NodeShare {
  CpuNode node;
  int threads;
  std::int64_t begin;
  std::int64_t end;
};

struct NumaPlan {
  std::vector<std::int64_t> order;  // every chunk once
  std::vector<NodeShare> shares;
};

// An array that a kernel reads or writes chunk by chunk. `weight` is the number of bytes moved per byte of the array.
struct ChunkedArray {
  const void* data;
  std::int64_t bytes_per_chunk;
  int weight;
};

// Divides `threads` over the nodes in proportion to the chunks whose data are nearest to them. A node gets no more
// threads than it has processors as long as another node has one left. Memory of a node without processors (a CXL card)
// counts towards the nearest node that has some. The kernel is asked about a sample of the pages of each array, so
// chunks are located in runs of 1/128 of the whole. Returns nothing if there is no choice: one node with processors,
// one thread, fewer than 64 chunks, or a kernel that does not report where pages are.
[[nodiscard]] std::optional<NumaPlan> plan_near_data(std::int64_t chunks, int threads,
                                                     const std::vector<ChunkedArray>& arrays);

// Returns the number of threads for each node, given its numbers of chunks and processors. They add up to `threads`,
// which is at least 1.
[[nodiscard]] std::vector<int> divide_threads(int threads, const std::vector<std::int64_t>& chunks,
                                              const std::vector<int>& processors);

// Returns which of `nodes` (positions in `distances`, a row of the kernel's table) is nearest, as an index into
// `nodes`; -1 if two are equally near.
[[nodiscard]] int nearest_node(const std::vector<int>& nodes, const std::vector<int>& distances);

// Keeps the calling thread on a node's processors until the end of the scope. It narrows the thread's affinity and
// never widens it.
class OnNode {
 public:
  explicit OnNode(const CpuNode& node);
  ~OnNode();
  OnNode(const OnNode&) = delete;
  OnNode& operator=(const OnNode&) = delete;

 private:
  cpu_set_t before_;
  bool changed_ = false;
};

// Returns whether the calling thread runs on a processor of `node`.
[[nodiscard]] bool runs_on(const CpuNode& node);

// Numbers of chunks that planned kernels have run since the process began: near their data, and elsewhere.
struct ChunkCounts {
  std::int64_t near;
  std::int64_t elsewhere;
};
[[nodiscard]] ChunkCounts numa_chunk_counts();
void count_chunks(std::int64_t near, std::int64_t elsewhere);

}  // namespace memascend
