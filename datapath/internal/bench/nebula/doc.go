// Package nebula has nothing but the version of nebula whose programs are compared with: its go.mod says it.
package nebula
