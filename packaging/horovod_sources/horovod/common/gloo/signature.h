// Sign the requests of a rank to the launcher's store, and its answers.
//
// The store is where ranks learn each other's addresses, and it listens on a
// network. The launcher and its ranks share a key, which travels in their
// environments; each request and each answer is signed with it (HMAC-SHA-256,
// RFC 2104, FIPS 180-4). So neither an unauthenticated client's request nor the
// answer of an impostor at the store's port is accepted, and the key itself is
// never sent. horovod/runner/http/signature.py is the store's side.

#ifndef HOROVOD_GLOO_SIGNATURE_H
#define HOROVOD_GLOO_SIGNATURE_H

#include <cstdint>
#include <string>
#include <vector>

// The key; without it nothing is signed, as in the published release.
#define HOROVOD_RENDEZVOUS_KEY "HOROVOD_RENDEZVOUS_KEY"

namespace horovod {
namespace common {

// Both return hexadecimal digits.
std::string Sha256(const std::string& message);
std::string HmacSha256(const std::string& key, const std::string& message);

// One request to the store. Each has a nonce, by which the store refuses a
// recorded request that is sent again.
class SignedRequest {
public:
  SignedRequest(const std::string& method, const std::string& path,
                const std::string& body);

  // Returns the lines to add to the request's header.
  std::vector<std::string> Headers() const;

  // Returns whether an answer with these lines in its header is the store's
  // answer to this request.
  bool IsAnsweredBy(int status, const std::vector<std::string>& headers,
                    const std::vector<uint8_t>& body) const;

private:
  std::string key_;
  std::string nonce_;
  std::string digest_;
  std::string signature_;
};

} // namespace common
} // namespace horovod

#endif // HOROVOD_GLOO_SIGNATURE_H
