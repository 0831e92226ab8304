# Read right after project(horovod): says where things are on this machine. build_horovod.py finds them and hands them
# over in the environment; what it does not set is left to CMake's own search.

# MPI out of the package index: named file by file, since its wrapper compilers print paths that CMake cannot take
# apart where they hold a blank. The machine's own MPI: its wrapper compiler is asked as usual.
if(DEFINED ENV{HVD_BUILD_MPI_LIBRARY})
  file(WRITE "${CMAKE_BINARY_DIR}/modules/FindMPI.cmake" [[
set(MPI_FOUND TRUE)
set(MPI_C_FOUND TRUE)
set(MPI_CXX_FOUND TRUE)
set(MPI_INCLUDE_PATH "$ENV{HVD_BUILD_MPI_INCLUDE}")
set(MPI_CXX_INCLUDE_PATH "$ENV{HVD_BUILD_MPI_INCLUDE}")
set(MPI_LIBRARIES "$ENV{HVD_BUILD_MPI_LIBRARY}")
set(MPI_CXX_LIBRARIES "$ENV{HVD_BUILD_MPI_LIBRARY}")
message(STATUS "MPI: ${MPI_LIBRARIES}")
]])
  list(PREPEND CMAKE_MODULE_PATH "${CMAKE_BINARY_DIR}/modules")
elseif(DEFINED ENV{HVD_BUILD_MPICXX})
  set(MPI_CXX_COMPILER "$ENV{HVD_BUILD_MPICXX}" CACHE FILEPATH "" FORCE)
endif()
# The C bindings are all that is used: without this, mpi.h asks for libmpi_cxx as well.
add_definitions(-DOMPI_SKIP_MPICXX= -DMPICH_SKIP_MPICXX=)

# CUDA and NCCL out of the package index have no unversioned libcudart.so and libnccl.so: name the files.
if(DEFINED ENV{HVD_BUILD_CUDART})
  set(CUDA_CUDART "$ENV{HVD_BUILD_CUDART}" CACHE FILEPATH "" FORCE)        # FindCUDAToolkit
  set(FOUND_LIB_cudart "$ENV{HVD_BUILD_CUDART}" CACHE FILEPATH "" FORCE)   # FindPytorch
endif()
if(DEFINED ENV{HVD_BUILD_NCCL_LIBRARY})
  set(NCCL_LIBRARY "$ENV{HVD_BUILD_NCCL_LIBRARY}" CACHE FILEPATH "" FORCE) # FindNCCL
  set(NCCL_INCLUDE_DIR "$ENV{HVD_BUILD_NCCL_INCLUDE}" CACHE PATH "" FORCE)
endif()

# Relocatable: the library finds its neighbours from where it lies, not from where it was built.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
string(REPLACE ":" ";" CMAKE_INSTALL_RPATH "$ENV{HVD_BUILD_RPATH}")
