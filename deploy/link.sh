#!/bin/sh
# link RATE: what this network namespace sends leaves at RATE, in whole mbit or gbit (200mbit, 1gbit, 40gbit, ...).
#
# It is the node's network that is shaped, so control calls and tokens share the link with KV, as they would on a wire.
# Ends when the interface is gone: a node that restarts gets a new namespace, and the restart of this follows it there.
set -eu

INTERFACE=eth0
MIN_BURST_BYTES=65536

number=${1%?bit}
case $number in
'' | *[!0-9]*) number=0 ;;
esac
case $1 in
*mbit) mbit=$number ;;
*gbit) mbit=$((number * 1000)) ;;
*) mbit=0 ;;
esac
if [ "$mbit" -eq 0 ]; then
    echo "link: HACKKV_LINK=$1: expected a rate such as 200mbit or 10gbit" >&2
    exit 2
fi

# A bucket of half a millisecond is as much as the link can be early; smaller ones cost fast links their rate.
burst=$((mbit * 1000000 / 8 / 2000))
[ "$burst" -ge "$MIN_BURST_BYTES" ] || burst=$MIN_BURST_BYTES
# The queue never drops what TCP has in flight: TCP keeps it short by itself.
tc qdisc replace dev "$INTERFACE" root tbf rate "${mbit}mbit" burst "$burst" limit $((burst + 16777216))
tc qdisc show dev "$INTERFACE"

trap 'tc qdisc del dev "$INTERFACE" root; exit 0' TERM INT
while ip link show dev "$INTERFACE" >/dev/null 2>&1; do
    sleep 1 &
    wait $!
done
echo "$INTERFACE is gone"
exit 1
