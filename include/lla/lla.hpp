// SPDX-License-Identifier: Apache-2.0
/**
 * @file lla.hpp
 * @brief The interface for C++17: owning handles, views, and batches that keep their memory. Header only.
 *
 * Works with and without exceptions and run-time type information. Every call that can fail takes an lla::error last and
 * returns a status. Where exceptions are enabled each has a twin without that argument (constructors for create()) which
 * throws lla::failure instead, and returns what the other one hands out by reference.
 *
 * Handles are references as in the C interface: copying one retains, destroying one releases, in any order and on any
 * thread. get() gives the C handle, for everything that has no method here. A moved-from or default-constructed handle is
 * NULL, which every call refuses with LLA_NULL_POINTER.
 */
#ifndef LLA_LLA_HPP
#define LLA_LLA_HPP

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <string_view>
#include <type_traits>
#include <utility>
#ifdef __cpp_exceptions
#include <exception>
#endif

#include "lla.h"

/** Everything of the C++ interface. */
namespace lla {

/** @brief A struct of the C interface that knows its size; every other field begins as 0, its default. */
template <class T>
struct sized : T {
  sized() noexcept : T() { this->struct_size = sizeof(T); }
};

using context_options = sized<lla_context_options>; /**< What a context is made of. */
using layer_desc = sized<lla_layer_desc>;           /**< Description of a layer. */
using state_desc = sized<lla_state_desc>;           /**< Description of a state. */
using batch_limits = sized<lla_batch_limits>;       /**< Limits of a batch. */
using rows = sized<lla_rows>;                       /**< Rows of a step. */
using image_info = sized<lla_image_info>;           /**< What a saved slot says about itself. */

/** @brief Why a call failed. */
struct error : sized<lla_error> {
  /** @brief Identifier of the status. @return "LLA_SHAPE_MISMATCH" for instance. */
  const char *name() const noexcept { return lla_status_name(code); }
};

#ifdef __cpp_exceptions
/** @brief What the calls without an error argument throw. */
class failure : public std::exception {
 public:
  /** @brief From what a call wrote. @param reason  code and text. */
  explicit failure(const lla::error &reason) noexcept : reason_(reason) {}
  /** @brief The text, which names the argument. @return never NULL. */
  const char *what() const noexcept override { return reason_.text; }
  /** @brief The status that the call returned. @return LLA_... */
  lla_status status() const noexcept { return reason_.code; }
  /** @brief Identifier of the status. @return static text. */
  const char *name() const noexcept { return reason_.name(); }

 private:
  lla::error reason_;
};
#endif

/** @cond not for use outside this header */
namespace detail {

#ifdef __cpp_exceptions
template <class Call>
void check(Call call) {  // runs a call that takes an error, and throws what it reports
  error reason;
  if (call(reason) != LLA_OK) throw failure(reason);
}
#endif

inline lla_status no_memory(error &reason) noexcept {
  constexpr char text[] = "no memory";
  reason.code = LLA_OUT_OF_MEMORY;
  std::memcpy(reason.text, text, sizeof text);
  return reason.code;
}

template <class T, T *(*Retain)(T *), void (*Release)(T *)>
class handle {  // a counted reference to an object of the C interface
 public:
  handle() noexcept = default;
  handle(const handle &other) noexcept : object_(Retain(other.object_)) {}
  handle(handle &&other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  handle &operator=(handle other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~handle() { Release(object_); }
  T *get() const noexcept { return object_; }
  explicit operator bool() const noexcept { return object_ != nullptr; }

 protected:
  void reset(T *object) noexcept {  // takes over what a call created
    Release(object_);
    object_ = object;
  }

 private:
  T *object_ = nullptr;
};

template <class T>
struct element;
template <>
struct element<float> {
  static constexpr lla_dtype dtype = LLA_F32;
};
template <>
struct element<double> {
  static constexpr lla_dtype dtype = LLA_F64;
};
template <>
struct element<std::int32_t> {
  static constexpr lla_dtype dtype = LLA_I32;
};
template <>
struct element<std::int64_t> {
  static constexpr lla_dtype dtype = LLA_I64;
};

}  // namespace detail
/** @endcond */

/** @brief A borrowed array: pointer and length, from a C array or anything with data() and size(). */
template <class T>
class array_ref {
 public:
  array_ref() noexcept = default;
  /** @brief From pointer and length. @param data  first element. @param size  elements. */
  array_ref(const T *data, std::size_t size) noexcept : data_(data), size_(size) {}
  /** @brief From a C array. @param array  the array. */
  template <std::size_t N>
  array_ref(const T (&array)[N]) noexcept : data_(array), size_(N) {}
  /** @brief From a container. @param container  std::array, std::vector, std::span, ... */
  template <class Container, class Data = decltype(std::declval<const Container &>().data()),
            class = std::enable_if_t<std::is_convertible_v<Data, const T *>>>
  array_ref(const Container &container) noexcept : data_(container.data()), size_(container.size()) {}
  /** @brief First element. @return NULL if nothing was given. */
  const T *data() const noexcept { return data_; }
  /** @brief Length. @return elements. */
  std::int64_t size() const noexcept { return static_cast<std::int64_t>(size_); }

 private:
  const T *data_ = nullptr;
  std::size_t size_ = 0;
};

/** Tensors in their roles: the arguments of a call. */
using bindings = array_ref<lla_binding>;

/**
 * @brief A contiguous tensor over memory of the caller.
 * @param data   first element; what is bound as an input is only read.
 * @param dtype  element type.
 * @param dims   1 ... LLA_MAX_RANK sizes.
 * @return the view.
 */
inline lla_tensor tensor(const void *data, lla_dtype dtype, std::initializer_list<std::int64_t> dims) noexcept {
  lla_tensor view{};
  std::int64_t stride = 1;
  view.data = const_cast<void *>(data);
  view.dtype = dtype;
  view.rank = static_cast<std::int32_t>(dims.size());  // a rank that there is not: the call refuses it
  if (dims.size() > LLA_MAX_RANK) return view;
  for (std::size_t i = dims.size(); i-- > 0;) {
    view.dims[i] = dims.begin()[i];
    view.strides[i] = stride;
    stride *= view.dims[i];
  }
  return view;
}
/**
 * @brief A contiguous tensor in its role. For other element types: lla_bind(role, lla::tensor(data, LLA_BF16, dims)).
 * @param role   LLA_Q, ...
 * @param data   first element, float or double.
 * @param dims   sizes.
 * @param flags  0, or LLA_ACCUMULATE for a gradient.
 * @return the binding.
 */
template <class T>
lla_binding bind(lla_role role, const T *data, std::initializer_list<std::int64_t> dims, std::int32_t flags = 0) noexcept {
  lla_binding binding = lla_bind(role, tensor(data, detail::element<T>::dtype, dims));
  binding.flags = flags;
  return binding;
}
/** @brief An array of integers in host memory. @param data  int32_t or int64_t, as many as the place asks for; NULL: not
 *  given. @return the index. */
template <class T>
lla_index indices(const T *data) noexcept {
  return {data, detail::element<T>::dtype, LLA_HOST};
}
/** @brief The same in memory of the device: of a plan that the device makes, or of counts that it knows. @param data  as for
 *  indices(). @return the index. */
template <class T>
lla_index device_indices(const T *data) noexcept {
  return {data, detail::element<T>::dtype, LLA_DEVICE};
}

/** @brief LLA_TAG_SIZE bytes that name model and prompt in a saved slot. */
struct tag {
  char bytes[LLA_TAG_SIZE] = {}; /**< the tag, filled up with zeros. */
  tag() noexcept = default;
  /** @brief From text. @param text  cut if longer. */
  tag(std::string_view text) noexcept {
    std::memcpy(bytes, text.data(), text.size() < sizeof bytes ? text.size() : sizeof bytes);
  }
};

/** @brief Aligned host memory. */
class host_memory {
 public:
  /** @brief Replaces what it held. @param bytes  size. @param alignment  a power of two. @param reason  says why not.
   *  @return LLA_OK, LLA_OUT_OF_MEMORY. */
  lla_status allocate(std::size_t bytes, std::size_t alignment, error &reason) noexcept {
    void *made = ::operator new (bytes ? bytes : 1, std::align_val_t{alignment}, std::nothrow);
    if (!made) return detail::no_memory(reason);
    memory_ = {static_cast<char *>(made), release(bytes, alignment)};
    return LLA_OK;
  }
  /** @brief First byte. @return NULL before allocate(). */
  char *data() const noexcept { return memory_.get(); }
  /** @brief Size. @return bytes. */
  std::size_t size() const noexcept { return memory_ ? memory_.get_deleter().size : 0; }

 private:
  struct release {
    std::size_t size, alignment;
    release(std::size_t bytes, std::size_t made_with) noexcept : size(bytes), alignment(made_with) {}
    void operator()(char *memory) const noexcept { ::operator delete (memory, std::align_val_t{alignment}); }
  };
  std::unique_ptr<char, release> memory_{nullptr, release(0, 1)};
};

/** @brief Which backend computes; see context.h. */
class context : public detail::handle<lla_context, lla_context_retain, lla_context_release> {
 public:
  context() noexcept = default;
  /** @brief Replaces the handle. @param options  see lla_context_options. @param reason  says why not.
   *  @return as lla_context_create(). */
  lla_status create(const lla_context_options &options, error &reason) noexcept {
    lla_context *made = nullptr;
    const lla_status status = lla_context_create(&options, &made, &reason);
    if (status == LLA_OK) reset(made);
    return status;
  }
#ifdef __cpp_exceptions
  explicit context(const lla_context_options &options) {
    detail::check([&](error &reason) { return create(options, reason); });
  }
#endif
};

/** @brief Memory where a context computes: on a GPU its own, on the CPU the host's. */
class device_memory {
 public:
  /** @brief Replaces what it held; work that uses that must have finished. @param owner  the context. @param bytes  size.
   *  @param reason  says why not. @return as lla_device_allocate(). */
  lla_status allocate(const context &owner, std::size_t bytes, error &reason) noexcept {
    void *made = nullptr;
    const lla_status status = lla_device_allocate(owner.get(), bytes, &made, &reason);
    if (status == LLA_OK) memory_ = {made, release(owner, bytes)};
    return status;
  }
  /** @brief First byte. @return NULL before allocate(). */
  void *data() const noexcept { return memory_.get(); }
  /** @brief Size. @return bytes. */
  std::size_t size() const noexcept { return memory_ ? memory_.get_deleter().size : 0; }

 private:
  struct release {
    context owner;
    std::size_t size;
    release(context from, std::size_t bytes) noexcept : owner(std::move(from)), size(bytes) {}
    void operator()(void *memory) const noexcept { lla_device_release(owner.get(), memory, size); }
  };
  std::unique_ptr<void, release> memory_{nullptr, release({}, 0)};
};

class batch;
class state;

/** @brief A mixer, cell, block or part; see layer.h. */
class layer : public detail::handle<lla_layer, lla_layer_retain, lla_layer_release> {
 public:
  layer() noexcept = default;
  /**
   * @brief Replaces the handle.
   * @param owner        the context.
   * @param description  see lla_layer_desc.
   * @param reason       names the field.
   * @return as lla_layer_create().
   */
  lla_status create(const context &owner, const lla_layer_desc &description, error &reason) noexcept {
    lla_layer *made = nullptr;
    const lla_status status = lla_layer_create(owner.get(), &description, &made, &reason);
    if (status == LLA_OK) reset(made);
    return status;
  }
  /**
   * @brief Computes the outputs of a planned batch's rows; see lla_layer_forward().
   * @param step     planned; with a state, commit it after the forward of all layers.
   * @param io       inputs and outputs.
   * @param weights  weights.
   * @param index    which layer of the state's group this is.
   * @param reason   names the argument.
   * @return as lla_layer_forward(), or why there is no workspace.
   */
  inline lla_status forward(batch &step, bindings io, bindings weights, std::int64_t index, error &reason) const noexcept;
  /**
   * @brief Computes gradients; see lla_layer_backward().
   * @param step       planned as for forward.
   * @param io         the inputs of forward.
   * @param weights    the weights of forward.
   * @param outputs    gradients of the outputs.
   * @param gradients  receive the gradients of inputs and weights; what is not listed is not computed.
   * @param index      which layer of the state's group this is.
   * @param reason     names the argument.
   * @return as lla_layer_backward(), or why there is no workspace.
   */
  inline lla_status backward(batch &step, bindings io, bindings weights, bindings outputs, bindings gradients,
                             std::int64_t index, error &reason) const noexcept;
#ifdef __cpp_exceptions
  layer(const context &owner, const lla_layer_desc &description) {
    detail::check([&](error &reason) { return create(owner, description, reason); });
  }
  void forward(batch &step, bindings io, bindings weights = {}, std::int64_t index = 0) const {
    detail::check([&](error &reason) { return forward(step, io, weights, index, reason); });
  }
  void backward(batch &step, bindings io, bindings weights, bindings outputs, bindings gradients,
                std::int64_t index = 0) const {
    detail::check([&](error &reason) { return backward(step, io, weights, outputs, gradients, index, reason); });
  }
#endif
};

/**
 * @brief Histories of many sequences (slots) for a group of layers; see state.h. Disjoint slots: any threads at once.
 *
 * On a device every change to slots is work on a stream: the last argument of the calls here, and for a batch the stream of
 * its plan. Without one it is the device's default stream; on the CPU there is none.
 */
class state : public detail::handle<lla_state, lla_state_retain, lla_state_release> {
 public:
  state() noexcept = default;
  /**
   * @brief Replaces the handle by a state with empty slots.
   * @param layers       the group.
   * @param description  see lla_state_desc.
   * @param reason       names the argument.
   * @return as lla_state_create().
   */
  lla_status create(array_ref<layer> layers, const lla_state_desc &description, error &reason) noexcept {
    const std::size_t count = static_cast<std::size_t>(layers.size());
    const std::unique_ptr<lla_layer *[]> handles(new (std::nothrow) lla_layer *[count ? count : 1]);
    if (!handles) return detail::no_memory(reason);
    for (std::size_t i = 0; i < count; ++i) handles[i] = layers.data()[i].get();
    lla_state *made = nullptr;
    const lla_status status = lla_state_create(handles.get(), layers.size(), &description, nullptr, 0, &made, &reason);
    if (status == LLA_OK) reset(made);
    return status;
  }
  /**
   * @brief Makes the rows of a batch part of their sequences, for all layers.
   * @param step      planned with this state.
   * @param accepted  rows to keep of each sequence; default (lla_index()) all.
   * @param reason    names the entry.
   * @return as lla_state_commit().
   */
  inline lla_status commit(batch &step, lla_index accepted, error &reason) noexcept;
  /**
   * @brief Lets the host's record catch up with a commit that happened on the device; see lla_state_settle().
   * @param step      committed; after batch::collect(), if the device planned it.
   * @param accepted  the counts, unless they were collected; default (lla_index()) none.
   * @param reason    names the entry.
   * @return as lla_state_settle().
   */
  inline lla_status settle(batch &step, lla_index accepted, error &reason) noexcept;
  /** @brief Plans, appends and commits rows to one slot of a state of one layer. For first programs: it allocates.
   *  @param only     the layer. @param slot  the slot. @param io  inputs and outputs. @param weights  weights.
   *  @param reason   names the argument. @param stream  of the device. @return as lla_append(). */
  lla_status append(const layer &only, std::int64_t slot, bindings io, bindings weights, error &reason,
                    void *stream = nullptr) noexcept {
    return lla_append(only.get(), get(), slot, io.data(), io.size(), weights.data(), weights.size(), stream, &reason);
  }
  /** @brief Copies a slot's history to another slot. @param source  the slot. @param target  receives it.
   *  @param reason  names the argument. @param stream  of the device. @return as lla_state_fork(). */
  lla_status fork(std::int64_t source, std::int64_t target, error &reason, void *stream = nullptr) noexcept {
    return lla_state_fork(get(), indices(&source), indices(&target), 1, stream, &reason);
  }
  /** @brief Empties a slot. @param slot  the slot. @param position  where it shall stand.
   *  @param reason  names the argument. @param stream  of the device. @return as lla_state_reset(). */
  lla_status clear(std::int64_t slot, std::int64_t position, error &reason, void *stream = nullptr) noexcept {
    return lla_state_reset(get(), indices(&slot), 1, indices(&position), stream, &reason);
  }
  /** @brief Takes rows back. @param slot  the slot. @param position  the new position.
   *  @param reason  names the argument. @param stream  of the device. @return as lla_state_truncate(). */
  lla_status truncate(std::int64_t slot, std::int64_t position, error &reason, void *stream = nullptr) noexcept {
    return lla_state_truncate(get(), slot, position, stream, &reason);
  }
  /** @brief Position of a slot. @param slot  the slot. @param position  receives it.
   *  @param reason  names the argument. @return as lla_state_length(). */
  lla_status length(std::int64_t slot, std::int64_t &position, error &reason) const noexcept {
    return lla_state_length(get(), slot, &position, &reason);
  }
  /** @brief Takes over the state of another library for one linear layer. @param slot  the slot. @param index  which layer
   * of the group. @param position  rows that the matrix has seen. @param matrix  [H, dk, dv], any strides; host memory.
   *  @param reset  whether to empty the slot first: for the first layer that is imported into it.
   *  @param reason  names the argument. @param stream  of the device, which is waited for.
   *  @return as lla_state_import_linear(). */
  lla_status import_linear(std::int64_t slot, std::int64_t index, std::int64_t position, const lla_tensor &matrix,
                           bool reset, error &reason, void *stream = nullptr) noexcept {
    return lla_state_import_linear(get(), slot, index, position, &matrix, reset ? 1 : 0, stream, &reason);
  }
  /** @brief A slot as bytes, sealed. @param slot  the slot. @param name  names model and prompt.
   *  @param image  receives them. @param reason  names the argument. @param stream  of the device, which is waited for.
   *  @return as lla_state_pack(). */
  lla_status save(std::int64_t slot, const tag &name, host_memory &image, error &reason,
                  void *stream = nullptr) const noexcept {
    std::size_t bytes = 0;
    host_memory made;
    lla_status status = lla_state_export_size(get(), slot, &bytes, &reason);
    if (status == LLA_OK) status = made.allocate(bytes, alignof(std::max_align_t), reason);
    if (status == LLA_OK) status = lla_state_pack(get(), slot, made.data(), bytes, stream, &reason);
    if (status == LLA_OK) status = lla_state_seal(made.data(), bytes, name.bytes, &reason);
    if (status == LLA_OK) image = std::move(made);
    return status;
  }
  /** @brief Checks what save() gave, and replaces a slot by it. @param slot  the slot. @param image  bytes from anywhere.
   *  @param name  the tag that they must carry. @param reason  says what is wrong. @param stream  of the device.
   *  @return as lla_state_check() and lla_state_unpack(). */
  lla_status load(std::int64_t slot, array_ref<char> image, const tag &name, error &reason,
                  void *stream = nullptr) noexcept {
    const std::size_t bytes = static_cast<std::size_t>(image.size());
    const lla_status status = lla_state_check(image.data(), bytes, name.bytes, nullptr, &reason);
    return status == LLA_OK ? lla_state_unpack(get(), slot, image.data(), bytes, stream, &reason) : status;
  }
#ifdef __cpp_exceptions
  state(array_ref<layer> layers, const lla_state_desc &description) {
    detail::check([&](error &reason) { return create(layers, description, reason); });
  }
  void commit(batch &step, lla_index accepted = {}) {
    detail::check([&](error &reason) { return commit(step, accepted, reason); });
  }
  void settle(batch &step, lla_index accepted = {}) {
    detail::check([&](error &reason) { return settle(step, accepted, reason); });
  }
  void append(const layer &only, std::int64_t slot, bindings io, bindings weights = {}, void *stream = nullptr) {
    detail::check([&](error &reason) { return append(only, slot, io, weights, reason, stream); });
  }
  void fork(std::int64_t source, std::int64_t target, void *stream = nullptr) {
    detail::check([&](error &reason) { return fork(source, target, reason, stream); });
  }
  void clear(std::int64_t slot, std::int64_t position = 0, void *stream = nullptr) {
    detail::check([&](error &reason) { return clear(slot, position, reason, stream); });
  }
  void truncate(std::int64_t slot, std::int64_t position, void *stream = nullptr) {
    detail::check([&](error &reason) { return truncate(slot, position, reason, stream); });
  }
  std::int64_t length(std::int64_t slot) const {
    std::int64_t position = 0;
    detail::check([&](error &reason) { return length(slot, position, reason); });
    return position;
  }
  void import_linear(std::int64_t slot, std::int64_t index, std::int64_t position, const lla_tensor &matrix, bool reset,
                     void *stream = nullptr) {
    detail::check([&](error &reason) { return import_linear(slot, index, position, matrix, reset, reason, stream); });
  }
  host_memory save(std::int64_t slot, const tag &name = {}, void *stream = nullptr) const {
    host_memory image;
    detail::check([&](error &reason) { return save(slot, name, image, reason, stream); });
    return image;
  }
  void load(std::int64_t slot, array_ref<char> image, const tag &name = {}, void *stream = nullptr) {
    detail::check([&](error &reason) { return load(slot, image, name, reason, stream); });
  }
#endif
};

/** @brief The rows of a step, with the memory that planning and computing them needs. One thread at a time; not copied. A
 * batch whose commit happened on the device is settled before it goes: slots and later commits wait for it. */
class batch {
 public:
  batch() noexcept = default;
  /** @brief Takes over. @param other  is as if default-constructed afterwards. */
  batch(batch &&other) noexcept { swap(other); }
  /** @brief Takes over. @param other  the new contents. @return *this. */
  batch &operator=(batch other) noexcept {
    swap(other);
    return *this;
  }
  ~batch() { lla_batch_discard(object_); }
  /** @brief Replaces it by an unplanned one. @param owner  the context. @param limits  the largest step.
   *  @param reason  names the field. @return as lla_batch_init(), or why there is no memory. */
  lla_status create(const context &owner, const lla_batch_limits &limits, error &reason) noexcept {
    batch made;
    std::size_t bytes = 0, alignment = 0;
    made.owner_ = owner;
    made.limits_ = limits;
    lla_status status = lla_batch_size(owner.get(), &limits, &bytes, &alignment, &reason);
    if (status == LLA_OK) status = made.memory_.allocate(bytes, alignment, reason);
    if (status == LLA_OK) status = lla_batch_init(owner.get(), &limits, made.memory_.data(), bytes, &made.object_, &reason);
    if (status == LLA_OK) status = lla_batch_device_size(owner.get(), &limits, &bytes, nullptr, &reason);
    if (status == LLA_OK && bytes) {
      status = made.plan_.allocate(owner, bytes, reason);
      if (status == LLA_OK) status = lla_batch_bind_device(made.object_, made.plan_.data(), bytes, &reason);
    }
    if (status == LLA_OK) swap(made);
    return status;
  }
  /** @brief Makes room for a layer's calls now, so that they need not. @param caller  the layer. @param pass  LLA_PASS_...
   *  @param reason  says why not. @return as lla_layer_workspace(), or why there is no memory. */
  lla_status reserve(const layer &caller, lla_pass pass, error &reason) noexcept {
    std::size_t bytes = 0;
    const lla_status status = lla_layer_workspace(caller.get(), &limits_, pass, &bytes, nullptr, &reason);
    if (status != LLA_OK || (workspace_.data() && bytes <= workspace_.size())) return status;
    return workspace_.allocate(owner_, bytes, reason);
  }
  /** @brief Plans a step; what was planned and not committed is dropped. @param history  the state, or an empty handle:
   *  every sequence starts empty. @param step  which rows belong to which slot. @param reason  names the entry.
   *  @param stream  of the device; also for the calls with this plan. @return as lla_batch_plan(). */
  lla_status plan(const state &history, const lla_rows &step, error &reason, void *stream = nullptr) noexcept {
    const lla_status status = lla_batch_plan(object_, history.get(), &step, stream, &reason);
    if (status == LLA_BUSY) return status;            // the plan that it has stays
    history_ = status == LLA_OK ? history : state();  // the old plan's state lives until here
    stream_ = stream;
    return status;
  }
  /** @brief Brings to the host what the device found out; waits for the stream. @param reason  says why not. @param stream
   * to wait for; the work of the batch must be before it there, or have finished. @return as lla_batch_collect(). */
  lla_status collect(error &reason, void *stream) noexcept { return lla_batch_collect(object_, stream, &reason); }
  /** @brief The same on the stream of the plan. @param reason  says why not. @return as lla_batch_collect(). */
  lla_status collect(error &reason) noexcept { return collect(reason, stream_); }
  /** @brief What was wrong in values that only the device could see. @return bits LLA_FAULT_...; see lla_batch_faults(). */
  std::uint32_t faults() const noexcept { return lla_batch_faults(object_); }
  /** @brief Drops the plan. */
  void discard() noexcept { lla_batch_discard(object_); }
  /** @brief The C handle. @return NULL before create(). */
  lla_batch *get() const noexcept { return object_; }
#ifdef __cpp_exceptions
  batch(const context &owner, const lla_batch_limits &limits) {
    detail::check([&](error &reason) { return create(owner, limits, reason); });
  }
  void reserve(const layer &caller, lla_pass pass) {
    detail::check([&](error &reason) { return reserve(caller, pass, reason); });
  }
  void plan(const state &history, const lla_rows &step, void *stream = nullptr) {
    detail::check([&](error &reason) { return plan(history, step, reason, stream); });
  }
  void collect(void *stream) {
    detail::check([&](error &reason) { return collect(reason, stream); });
  }
  void collect() { collect(stream_); }
#endif

 private:
  friend class layer;
  friend class state;
  void swap(batch &other) noexcept {
    std::swap(owner_, other.owner_);
    std::swap(history_, other.history_);
    std::swap(limits_, other.limits_);
    std::swap(memory_, other.memory_);
    std::swap(plan_, other.plan_);
    std::swap(workspace_, other.workspace_);
    std::swap(object_, other.object_);
    std::swap(stream_, other.stream_);
  }
  context owner_;
  state history_;
  lla_batch_limits limits_{};
  host_memory memory_;
  device_memory plan_, workspace_;
  lla_batch *object_ = nullptr;
  void *stream_ = nullptr;
};

lla_status layer::forward(batch &step, bindings io, bindings weights, std::int64_t index, error &reason) const noexcept {
  const lla_status status = step.reserve(*this, LLA_PASS_FORWARD, reason);
  if (status != LLA_OK) return status;
  sized<lla_forward_args> call;
  call.batch = step.object_;
  call.state = step.history_.get();
  call.layer_index = index;
  call.io = io.data();
  call.io_count = io.size();
  call.weights = weights.data();
  call.weight_count = weights.size();
  call.workspace = step.workspace_.data();
  call.workspace_bytes = step.workspace_.size();
  call.stream = step.stream_;
  return lla_layer_forward(get(), &call, &reason);
}

lla_status layer::backward(batch &step, bindings io, bindings weights, bindings outputs, bindings gradients,
                           std::int64_t index, error &reason) const noexcept {
  const lla_status status = step.reserve(*this, LLA_PASS_BACKWARD, reason);
  if (status != LLA_OK) return status;
  sized<lla_backward_args> call;
  call.batch = step.object_;
  call.state = step.history_.get();
  call.layer_index = index;
  call.io = io.data();
  call.io_count = io.size();
  call.weights = weights.data();
  call.weight_count = weights.size();
  call.outputs = outputs.data();
  call.output_count = outputs.size();
  call.gradients = gradients.data();
  call.gradient_count = gradients.size();
  call.workspace = step.workspace_.data();
  call.workspace_bytes = step.workspace_.size();
  call.stream = step.stream_;
  return lla_layer_backward(get(), &call, &reason);
}

lla_status state::commit(batch &step, lla_index accepted, error &reason) noexcept {
  return lla_state_commit(get(), step.object_, accepted, step.stream_, &reason);
}

lla_status state::settle(batch &step, lla_index accepted, error &reason) noexcept {
  return lla_state_settle(get(), step.object_, accepted, nullptr, &reason);
}

}  // namespace lla

#endif
