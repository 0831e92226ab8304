# Read by CMake before project(), through the environment variable CMAKE_TOOLCHAIN_FILE (CMake >= 3.21).
# It has one purpose: to have CMake read horovod-project.cmake right after project(horovod).
set(CMAKE_PROJECT_horovod_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/horovod-project.cmake")
