#!/bin/sh
# link RATE [DELAY]: what this network namespace sends leaves at RATE (200mbit, 1gbit, 10gbit, ...), DELAY later; tc's units.
#
# It is the node's network that is shaped, so control calls and tokens share the link with KV, as they would on a wire.
# Ends when the interface is gone: a node that restarts gets a new namespace, and the restart of this follows it there.
set -eu
rate=$1
delay=${2:-0ms}
interface=eth0

# netem paces by packet; its queue must hold what the link has in flight, and a send buffer of the kernel beside it.
tc qdisc replace dev "$interface" root netem rate "$rate" delay "$delay" limit 100000
tc qdisc show dev "$interface"

trap 'tc qdisc del dev "$interface" root; exit 0' TERM INT
while ip link show dev "$interface" >/dev/null 2>&1; do
    sleep 1 &
    wait $!
done
echo "$interface is gone"
exit 1
