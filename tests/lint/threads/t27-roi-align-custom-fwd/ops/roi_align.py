import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.cuda.amp import custom_bwd, custom_fwd
from torch.nn.modules.utils import _pair
from torch.utils.cpp_extension import load

ext_module = load(name="roi_align_ext", sources=["ops/csrc/roi_align.cpp", "ops/csrc/roi_align_cuda.cu"])


class RoIAlignFunction(Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, input, rois, output_size, spatial_scale=1.0, sampling_ratio=0, pool_mode="avg", aligned=True):
        ctx.output_size = _pair(output_size)
        ctx.spatial_scale = spatial_scale
        ctx.sampling_ratio = sampling_ratio
        ctx.pool_mode = 0 if pool_mode == "max" else 1
        ctx.aligned = aligned
        ctx.input_shape = input.size()

        output_shape = (rois.size(0), input.size(1), ctx.output_size[0], ctx.output_size[1])
        output = input.new_zeros(output_shape)
        argmax_y = input.new_zeros(0 if ctx.pool_mode else output_shape)
        argmax_x = input.new_zeros(0 if ctx.pool_mode else output_shape)
        ext_module.roi_align_forward(input, rois, output, argmax_y, argmax_x, ctx.output_size[0], ctx.output_size[1],
                                     ctx.spatial_scale, ctx.sampling_ratio, ctx.pool_mode, ctx.aligned)
        ctx.save_for_backward(rois, argmax_y, argmax_x)
        return output

    @staticmethod
    @once_differentiable
    @custom_bwd
    def backward(ctx, grad_output):
        rois, argmax_y, argmax_x = ctx.saved_tensors
        grad_input = grad_output.new_zeros(ctx.input_shape)
        ext_module.roi_align_backward(grad_output.contiguous(), rois, argmax_y, argmax_x, grad_input,
                                      ctx.output_size[0], ctx.output_size[1], ctx.spatial_scale, ctx.sampling_ratio,
                                      ctx.pool_mode, ctx.aligned)
        return grad_input, None, None, None, None, None, None


roi_align = RoIAlignFunction.apply


class RoIAlign(nn.Module):
    def __init__(self, output_size, spatial_scale=1.0, sampling_ratio=0, pool_mode="avg", aligned=True):
        super().__init__()
        self.args = (output_size, spatial_scale, sampling_ratio, pool_mode, aligned)

    def forward(self, input, rois):
        return roi_align(input, rois, *self.args)
