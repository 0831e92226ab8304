// The devices that this process may use.
#pragma once

namespace fake {

int visible_devices();

} // namespace fake
