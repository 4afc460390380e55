// Package guest has tests of what a guest of vmrun has. They are run in one, by the tests of vmrun.
package guest
