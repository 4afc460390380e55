//go:build !linux

package hostaddr

import "time"

const again = 10 * time.Second

// events is of no use here: nothing is heard of changes.
func (r *Role) events() (<-chan struct{}, func(), error) { return nil, func() {}, nil }
