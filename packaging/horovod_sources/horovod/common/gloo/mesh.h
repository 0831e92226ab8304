// Contexts of Gloo in which all ranks are connected with one another.
//
// Gloo's own way asks a store for the addresses of each rank, one after another
// and again and again until they are there: with 32 ranks that are 15,000
// requests. Here the addresses of all ranks come in one exchange, over the
// launcher's store for all ranks of a job, and over these ranks' own
// connections for the ranks of a host or of a process set.

#ifndef HOROVOD_GLOO_MESH_H
#define HOROVOD_GLOO_MESH_H

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "gloo/context.h"
#include "gloo/transport/device.h"

namespace horovod {
namespace common {

// How a rank is connected: the device it listens at, and how long it waits.
struct Connecting {
  std::shared_ptr<gloo::transport::Device> device;
  std::chrono::milliseconds timeout;
};

// Is given one address for each rank, all of one length, where this rank waits
// for that one; returns the addresses where the ranks wait for this one. What
// stands in the place of the rank itself has no meaning.
using Exchange =
    std::function<std::vector<char>(const std::vector<char>& addresses)>;

// Returns a context of `size` ranks.
std::shared_ptr<gloo::Context> Mesh(int rank, int size,
                                    const Connecting& connecting,
                                    const Exchange& exchange);

// Returns a context of some ranks of `parent`, in which their numbers are
// `members`, in the order of their ranks. All ranks of `parent` call it at the
// same time, each with the members of its own context; a rank that is in none
// gives none, and gets null. A context of all ranks is `parent` itself.
std::shared_ptr<gloo::Context>
MeshAmong(const std::shared_ptr<gloo::Context>& parent,
          const std::vector<int>& members, const Connecting& connecting);

} // namespace common
} // namespace horovod

#endif // HOROVOD_GLOO_MESH_H
