//go:build tools

package nebula

import (
	_ "github.com/slackhq/nebula/cmd/nebula"
	_ "github.com/slackhq/nebula/cmd/nebula-cert"
)
