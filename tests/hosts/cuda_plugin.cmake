# SPDX-License-Identifier: Apache-2.0
# Usage: cmake -DPROGRAM=... -DLIBRARY=liblla.so.0 -DDIR=folder -DTABLE=... -DNOTHING=... -DINTRUDER=... -P this
# Puts copies of the library into folders of their own, with various things in place of its CUDA plugin, and around them what must not
# be found.
file(REMOVE_RECURSE ${DIR})

function(expect name file status word)
  file(MAKE_DIRECTORY ${DIR}/${name}/lla)
  file(COPY_FILE ${LIBRARY} ${DIR}/${name}/liblla.so.0)
  if(file)
    file(COPY_FILE ${file} ${DIR}/${name}/lla/liblla-cuda.so)
  endif()
  # Every place that a careless search would look at holds the intruder.
  file(MAKE_DIRECTORY ${DIR}/${name}/elsewhere/lla)
  file(COPY_FILE ${INTRUDER} ${DIR}/${name}/elsewhere/liblla-cuda.so)
  file(COPY_FILE ${INTRUDER} ${DIR}/${name}/elsewhere/lla/liblla-cuda.so)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${DIR}/${name}/elsewhere:${DIR}/${name}/elsewhere/lla
            PATH=${DIR}/${name}/elsewhere:$ENV{PATH} HOME=${DIR}/${name}/elsewhere
            ${PROGRAM} ${DIR}/${name}/liblla.so.0 ${status} ${word}
    WORKING_DIRECTORY ${DIR}/${name}/elsewhere RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  message(STATUS "${name}: ${text}")
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${name}: exit code ${code}")
  endif()
endfunction()

file(WRITE ${DIR}/text.so "not a library at all")
execute_process(COMMAND head -c 5000 ${TABLE} OUTPUT_FILE ${DIR}/truncated.so COMMAND_ERROR_IS_FATAL ANY)
expect(absent "" LLA_BACKEND_MISSING "not installed")
expect(text ${DIR}/text.so LLA_BACKEND_MISMATCH "cannot be opened")
expect(truncated ${DIR}/truncated.so LLA_BACKEND_MISMATCH "cannot be opened")
expect(without_symbol ${NOTHING} LLA_BACKEND_MISMATCH "another version")
expect(other_build ${TABLE} LLA_BACKEND_MISMATCH "another version")
# The test itself must notice an intruder: put in the right place it ends the process.
file(COPY_FILE ${INTRUDER} ${DIR}/absent/lla/liblla-cuda.so)
execute_process(COMMAND ${PROGRAM} ${DIR}/absent/liblla.so.0 LLA_BACKEND_MISSING installed RESULT_VARIABLE code OUTPUT_QUIET)
if(NOT code EQUAL 77)
  message(FATAL_ERROR "the intruder was opened and not noticed: ${code}")
endif()
