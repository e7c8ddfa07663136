// SPDX-License-Identifier: Apache-2.0
// Problems cut by heads: slices that are worked on one after the other in the same scratch, each a problem of its own.
//
// Heads are counted in the order in which heads of a group are neighbours. A slice is all heads, whole groups, whole parts
// of one group or some heads of one part, so that sums over a group's heads go in an order that slices do not change.
#pragma once

#include <algorithm>

#include "plugin/problem.h"

namespace lla::cuda {

struct HeadSlice {
  int64_t first = 0, count = 0;
};

class HeadSlices {
 public:
  // `part`: heads of a group whose sums are made together; counted from the group's first head.
  HeadSlices(const MixerShape& shape, int64_t part)
      : shape_(shape), members_(shape.heads / shape.groups), part_(std::min(part, members_)), size_(shape.heads) {}

  // Makes the slices as large as `fits(heads)` allows; fits() of fewer heads is true where that of more is.
  template <class Fits>
  void choose(Fits fits) {
    size_ = shape_.heads;
    if (fits(size_)) return;
    // Groups whose heads are not neighbours in memory go one by one.
    int64_t groups = members_ > 1 && shape_.head_map == LLA_HEAD_MAP_CYCLIC ? 1 : shape_.groups;
    for (groups = std::min(groups, shape_.groups - 1); groups > 0; --groups) {
      size_ = groups * members_;
      if (fits(size_)) return;
    }
    for (size_ = (members_ - 1) / part_ * part_; size_ > 0; size_ -= part_) {
      if (fits(size_)) return;
    }
    for (size_ = part_ - 1; size_ > 1; --size_) {
      if (fits(size_)) return;
    }
    size_ = 1;
  }
  bool cuts_groups() const { return size_ < members_; }
  HeadSlice first() const { return {0, count_at(0)}; }
  HeadSlice next(const HeadSlice& slice) const {
    const int64_t begin = slice.first + slice.count;
    return {begin, count_at(begin)};
  }
  // Of a slice: whether a part begins or ends with it, which part of its group comes first, whether its group ends.
  bool begins_part(const HeadSlice& slice) const { return slice.first % members_ % part_ == 0; }
  bool ends_part(const HeadSlice& slice) const {
    const int64_t end = (slice.first + slice.count) % members_;
    return end == 0 || end % part_ == 0;
  }
  int64_t part_of(const HeadSlice& slice) const { return slice.first % members_ / part_; }
  bool ends_group(const HeadSlice& slice) const { return (slice.first + slice.count) % members_ == 0; }

  // The problem of a slice, for MixerForward and MixerBackward.
  template <class Problem>
  Problem problem_of(Problem problem, const HeadSlice& slice) const {
    if (slice.count == shape_.heads) return problem;
    const bool strided = members_ > 1 && shape_.head_map == LLA_HEAD_MAP_CYCLIC;
    const int64_t group = slice.first / members_, member = slice.first % members_;
    const int64_t head = strided ? member * shape_.groups + group : slice.first, step = strided ? shape_.groups : 1;
    MixerShape& shape = problem.shape;
    shape.groups = std::max<int64_t>(slice.count / members_, 1);
    shape.heads = slice.count;
    shape.head_map = LLA_HEAD_MAP_BLOCKED;
    each_view(
        problem, [&](View& view) { move(&view, group, 1); }, [&](View& view) { move(&view, head, step); });
    move(&problem.state, head, step, group);
    if constexpr (requires { problem.gradient; }) move(&problem.gradient, head, step, group);
    return problem;
  }

 private:
  int64_t count_at(int64_t begin) const {
    const int64_t left = shape_.heads - begin, member = begin % members_;
    int64_t most = left;  // 0 after the last head
    if (size_ < members_) most = std::min(most, members_ - member);
    if (size_ < part_) most = std::min(most, part_ - member % part_);
    return std::min(size_, most);
  }
  static void move(View* view, int64_t first, int64_t step) {
    if (view->present()) view->data = view->at(0, 0, first);
    view->head_stride *= step;
  }
  static void move(SlotMemory* memory, int64_t head, int64_t step, int64_t group) {
    memory->first_head = head;
    memory->head_step = step;
    memory->first_group = group;
  }
  // Calls of_groups for the tensors that have rows by groups, of_heads for those by heads.
  template <class Groups, class Heads>
  static void each_view(MixerForward& p, Groups of_groups, Heads of_heads) {
    for (View* view : {&p.q, &p.k}) of_groups(*view);
    for (View* view : {&p.v, &p.gate, &p.write, &p.lambda, &p.y}) of_heads(*view);
  }
  template <class Groups, class Heads>
  static void each_view(MixerBackward& p, Groups of_groups, Heads of_heads) {
    for (View* view : {&p.q, &p.k, &p.dq, &p.dk}) of_groups(*view);
    for (View* view : {&p.v, &p.gate, &p.write, &p.lambda, &p.dy, &p.dv, &p.dgate, &p.dwrite, &p.dlambda}) of_heads(*view);
  }

  MixerShape shape_;
  int64_t members_, part_, size_;
};

}  // namespace lla::cuda
