// SPDX-License-Identifier: Apache-2.0
// Failures of the example: one exception type, and calls of lla that throw it with the library's own words.
#pragma once

#include <lla/lla.h>

#include <stdexcept>
#include <string>

namespace lm {

// Something the user can understand and act on; main() prints it and ends with exit code 1.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Calls a function of lla whose last parameter is the lla_error, and throws if it fails.
template <class... Parameters, class... Arguments>
void call(const char* name, lla_status (*function)(Parameters...), Arguments... arguments) {
  lla_error error = LLA_ERROR_INIT;
  const lla_status status = function(arguments..., &error);
  if (status != LLA_OK) {
    const char* text = error.text[0] ? error.text : lla_status_message(status);
    throw Error(std::string(name) + ": " + lla_status_name(status) + ": " + text);
  }
}

}  // namespace lm

// LM_CALL(lla_batch_plan, batch, state, &rows, nullptr): the call with its name for the message.
#define LM_CALL(function, ...) ::lm::call(#function, &function, __VA_ARGS__)
