# SPDX-License-Identifier: Apache-2.0
# Usage: cmake -DLM=program -DTEXT=file -DDIR=folder [-DRUN=command before the program] -P this
# Every file of a checkpoint cut at many places, missing, or not writable: exit code 1, a text that names the file, and nothing
# of the folder changed.
file(REMOVE_RECURSE ${DIR})
file(MAKE_DIRECTORY ${DIR})

set(size --data ${TEXT} --layers 1 --hidden 16 --heads 2 --state 4 --context 32 --batch 1 --threads 1)
execute_process(COMMAND ${RUN} ${LM} train ${size} --steps 2 --out ${DIR}/whole RESULT_VARIABLE code OUTPUT_QUIET)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "training failed")
endif()

# Names and contents of what stands in a folder.
function(fingerprint folder out)
  file(GLOB files RELATIVE ${folder} ${folder}/*)
  set(all)
  foreach(file ${files})
    file(SHA256 ${folder}/${file} hash)
    list(APPEND all "${file}=${hash}")
  endforeach()
  set(${out} "${all}" PARENT_SCOPE)
endfunction()
# Fails with a text that names `file`, and leaves the folder alone.
function(refused folder file)
  fingerprint(${folder} before)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE errors)
  fingerprint(${folder} after)
  if(NOT code EQUAL 1)
    message(FATAL_ERROR "${ARGN}: exit code ${code}\n${text}\n${errors}")
  endif()
  if(NOT errors MATCHES "${file}")
    message(FATAL_ERROR "${ARGN}: the text does not name ${file}: ${errors}")
  endif()
  if(NOT before STREQUAL after)
    message(FATAL_ERROR "${ARGN}: changed ${before}\nto ${after}")
  endif()
endfunction()

foreach(file model.safetensors config.json training.safetensors)
  file(SIZE ${DIR}/whole/${file} bytes)
  math(EXPR half "${bytes} / 2")
  math(EXPR last "${bytes} - 2") # config.json may end with a line feed that it can do without
  foreach(length 0 1 7 8 9 60 ${half} ${last} missing)
    file(REMOVE_RECURSE ${DIR}/cut)
    file(COPY ${DIR}/whole/ DESTINATION ${DIR}/cut)
    if(length STREQUAL missing)
      file(REMOVE ${DIR}/cut/${file})
    else()
      execute_process(COMMAND head -c ${length} ${DIR}/whole/${file} OUTPUT_FILE ${DIR}/cut/${file})
    endif()
    if(file STREQUAL training.safetensors)
      refused(${DIR}/cut ${file} ${RUN} ${LM} train --resume --out ${DIR}/cut)
    else()
      refused(${DIR}/cut ${file} ${RUN} ${LM} generate --model ${DIR}/cut --prompt x --tokens 2)
      refused(${DIR}/cut ${file} ${RUN} ${LM} eval --model ${DIR}/cut --data ${TEXT})
    endif()
  endforeach()
endforeach()

# A disk that is full: the checkpoint before stays whole, and no file that was begun is left.
refused(${DIR}/whole model.safetensors sh -c "trap '' XFSZ && ulimit -f 16 && exec \"$@\"" sh
        ${RUN} ${LM} train --resume --out ${DIR}/whole --steps 4)
execute_process(COMMAND ${RUN} ${LM} train --resume --out ${DIR}/whole --steps 4 RESULT_VARIABLE code OUTPUT_VARIABLE text)
if(NOT code EQUAL 0 OR NOT text MATCHES "resumed after step 2")
  message(FATAL_ERROR "the checkpoint before cannot be resumed: exit code ${code}\n${text}")
endif()
